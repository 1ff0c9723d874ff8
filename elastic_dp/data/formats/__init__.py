"""The formats of shards: Parquet, Arrow IPC and tar. What files are is found by their endings, or
else by their first bytes."""

from __future__ import annotations

from elastic_dp.data.formats.file_format import FileFormat

ENDINGS: dict[str, tuple[str, ...]] = {
    "parquet": (".parquet", ".pq", ".parq"),
    "arrow": (".arrow", ".feather", ".ipc"),
    "tar": (".tar",),
}
MAGIC_BYTES = 512
_MAGIC = {  # (index, bytes) of the beginning of a file
    (0, b"PAR1"): "a Parquet file",
    (0, b"ARROW1"): "an Arrow file",
    (0, b"FEA1"): "a Feather file of version 1; write it again by `pyarrow.feather`",
    (257, b"ustar"): "a tar archive",
    (0, b"\x1f\x8b"): "compressed with gzip",
    (0, b"\xfd7zXZ\0"): "compressed with xz",
    (0, b"\x28\xb5\x2f\xfd"): "compressed with zstd",
    (0, b"BZh"): "compressed with bzip2",
    (0, b"\x04\x22\x4d\x18"): "compressed with lz4",
    (0, b"PK\x03\x04"): "a zip archive",
    (0, b"Obj\x01"): "an Avro file",
    (0, b"ORC"): "an ORC file",
    (0, b"\x89HDF"): "an HDF5 file",
    (0, b"version https://git-lfs"): "a pointer of Git LFS; run `git lfs pull` in the clone",
    (0, b"<"): "a page in HTML or XML, as a server answers instead of a file",
}
_FORMAT_OF = {"a Parquet file": "parquet", "an Arrow file": "arrow", "a tar archive": "tar"}


def format_of(name: str) -> str:
    """The format that the file's ending names; "" if the ending is of no format."""
    lower = name.lower()
    return next((name for name, endings in ENDINGS.items() if lower.endswith(endings)), "")


def open_format(name: str) -> FileFormat:
    """Imports nothing of other formats."""
    if name == "parquet":
        from elastic_dp.data.formats.parquet import Parquet

        return Parquet()
    if name == "arrow":
        from elastic_dp.data.formats.arrow import Arrow

        return Arrow()
    assert name == "tar", name
    from elastic_dp.data.formats.tar import Tar

    return Tar()


def content_of(first: bytes) -> str:
    """What a file with these first bytes is; "" if they do not tell."""
    return next((what for (at, m), what in _MAGIC.items() if first[at:].startswith(m)), "")


def format_of_content(first: bytes) -> str:
    return _FORMAT_OF.get(content_of(first), "")
