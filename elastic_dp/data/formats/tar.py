"""WebDataset tar: a sample is a sequence of members with the same key; each member is a column.

`images/7.jpg` and `images/7.cls` are the sample `images/7`, with the columns `__key__`, `jpg` and
`cls`. A key goes up to the first dot of the file's name. Columns are bytes, but `txt` and `json`
are text, and `cls` is an integer. Row groups are ranges of about 4 MiB of the tar, in its order. A
compressed tar cannot be cut, and is refused.

As in webdataset, members without an ending (LICENSE) are not samples; nor are notes such as
README.md. Only its name decides whether a member is skipped, so that `scan` and `read` agree. A
link that would be a column of a sample is refused, and so are anything after the end of the archive
and an archive without one.
"""

from __future__ import annotations

import io
import tarfile
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from elastic_dp.data.formats.file_format import RowGroupLocation, Scan, ShardAt, ShardFile
from elastic_dp.errors import DataError

GROUP_BYTES = 4 << 20
_BLOCK = 512
_READ_BYTES = 1 << 20  # per read during a scan; longer members are skipped by a seek
_KEY = "__key__"
_KINDS = {
    _KEY: pa.large_string(),
    "txt": pa.large_string(),
    "json": pa.large_string(),
    "cls": pa.int64(),
}
_NOTE_STEMS = {
    "README",
    "LICENSE",
    "LICENCE",
    "COPYING",
    "NOTICE",
    "CHANGELOG",
    "CITATION",
    "AUTHORS",
}
_NOTE_ENDINGS = {"md", "txt", "rst", "html", "cff", "bib"}
_ONCE = 64  # columns of a single sample that a shard may have
_SHOWN = 40  # bytes of a value, in an error message


class Tar:
    name = "tar"
    scans_content = True
    growth = 1.0

    def scan(self, shard: ShardAt, columns: Sequence[str] | None) -> Scan:
        names = Counter({_KEY: 0})  # number of samples that have the column
        here: set[str] = set()  # columns of the current sample
        groups: list[list[int]] = []
        check, last_key = 0, None
        for member, key, ending in _members(ShardFile.buffered(shard, _READ_BYTES), whole=True):
            end = member.offset_data + -(-member.size // _BLOCK) * _BLOCK
            if member.offset_data + member.size > shard.size:
                raise tarfile.ReadError(f"{member.name} goes past the end; the shard was cut off")
            if key != last_key:
                if not groups or groups[-1][2] - groups[-1][1] >= GROUP_BYTES:
                    groups.append([0, member.offset, end])
                groups[-1][0] += 1
                here = {_KEY}
                names[_KEY] += 1
            if ending in here:
                raise DataError(
                    f"{shard.name} has {member.name!r} twice (the sample {key!r} has two "
                    f"columns {ending!r}), and which one is "
                    "meant is not known; write the shard again with one of them"
                )
            groups[-1][2] = min(end, shard.size)
            names[ending] += 1
            here.add(ending)
            last_key = key
            check = zlib.crc32(f"{member.name} {member.size} {member.mtime}".encode(), check)
        _refuse_dotted_keys(shard.name, names)
        rows, starts, ends = np.array(groups, dtype=np.int64).reshape(-1, 3).T.copy()
        schema = pa.schema([(name, _KINDS.get(name, pa.large_binary())) for name in names])
        nbytes = 2 * (ends - starts) + rows * 16 * len(names)
        nulls = {name: names[_KEY] - count for name, count in names.items()}
        return Scan(
            schema=schema,
            rows=rows,
            starts=starts,
            ends=ends,
            nbytes=nbytes,
            stored=ends - starts,
            check=check,
            nulls=nulls,
        )

    def read(
        self, shard: ShardAt, location: RowGroupLocation, schema: pa.Schema, leaves: list[str]
    ) -> pa.Table:
        content = memoryview(shard.read(location.start, location.end))
        samples: list[dict[str, Any]] = []
        for member, key, ending in _members(io.BytesIO(content)):
            if not samples or samples[-1][_KEY] != key:
                samples.append({_KEY: key})
            end = member.offset_data + member.size
            if end > len(content):
                raise tarfile.ReadError(f"{member.name} was cut off")
            if ending in schema.names:
                value = content[member.offset_data : end]
                samples[-1][ending] = _value(
                    schema.field(ending).type, value, f"{member.name!r} of {shard.name}"
                )
        return pa.table(
            {f.name: pa.array([s.get(f.name) for s in samples], f.type) for f in schema}
        )

    def close(self) -> None:
        pass


def _refuse_dotted_keys(shard: str, names: Counter[str]) -> None:
    """Raises DataError if columns grow with the samples, as of the members "img.0001.jpg"."""
    once = [name for name, count in names.items() if count == 1 and name != _KEY]
    if len(once) > _ONCE and 2 * len(once) >= len(names):
        raise DataError(
            f"{shard} has {len(once)} columns that one sample has, such as {once[0]!r} and "
            f"{once[1]!r}: the key of a sample ends at the first dot of a member's name, and what "
            "follows is the column. Write the members with keys that have no dot"
        )


def _members(file: Any, *, whole: bool = False) -> Iterator[tuple[tarfile.TarInfo, str, str]]:
    """(member, key, column) of the members that belong to samples. `whole`: the file is a whole
    archive. tarfile handles long names and extended headers.

    tarfile takes a broken header for the end of the archive, so the bytes at which it stopped are
    checked here.
    """
    with tarfile.open(fileobj=file, mode="r:") as members:
        member = tarfile.TarInfo()
        for member in members:
            members.members = []  # type: ignore[attr-defined]  # otherwise tarfile keeps all of them
            if member.size < 0:  # tarfile would seek back, and some versions loop forever
                raise tarfile.ReadError(f"{member.name} has the size {member.size}")
            name = member.name.rsplit("/", 1)[-1]
            if name.startswith(".") or member.isdir():
                continue
            if member.issparse():
                raise tarfile.ReadError(
                    f"{member.name} is a sparse member, whose bytes do not lie there as they "
                    "are; write the tar "
                    "without --sparse"
                )
            if _is_note(name):
                continue
            if member.islnk() or member.issym():
                raise tarfile.ReadError(
                    f"{member.name} is a link to {member.linkname}, and its bytes do not lie "
                    "there; write the tar with "
                    "`tar --dereference --hard-dereference`"
                )
            if member.isfile():
                key, ending = _split(member.name)
                if ending == _KEY:
                    raise tarfile.ReadError(
                        f"{member.name} has the ending {_KEY!r}, which names the sample; rename it"
                    )
                yield member, key, ending
        file.seek(members.offset)
        end = file.read(_BLOCK)
        if end.strip(b"\0"):
            raise tarfile.ReadError(f"no member begins at byte {members.offset}")
        if not end and whole:
            raise tarfile.ReadError(
                f"it ends behind {member.name} without a tar's end mark, so more may have been cut "
                "off; write it again, or append 1,024 bytes of zeros if it is whole"
            )
        while rest := file.read(_READ_BYTES):
            if rest.strip(b"\0"):
                raise tarfile.ReadError(
                    f"more follows its end, which is at byte {members.offset}, most likely "
                    "another tar; to join tars use "
                    "`tar --concatenate`, not cat, or leave them apart"
                )


def _split(name: str) -> tuple[str, str]:
    folder, slash, file = name.rpartition("/")
    key, _, ending = file.partition(".")
    return folder + slash + key, ending.lower()


def _is_note(name: str) -> bool:
    stem, dot, ending = name.partition(".")
    return not dot or (stem in _NOTE_STEMS and ending.lower() in _NOTE_ENDINGS)


def _value(kind: pa.DataType, content: memoryview, what: str) -> Any:
    """The value of a member as `kind`. `what`: the member and its shard, for messages."""
    if pa.types.is_integer(kind):
        try:
            number = int(bytes(content))
        except ValueError:
            shown = bytes(content[:_SHOWN]).decode("utf-8", "replace")
            raise DataError(
                f"{what} holds {shown!r}, and '.cls' must be a whole number; name such "
                "members '.txt', or leave the column "
                "out by DataConfig.columns"
            ) from None
        if not -(1 << 63) <= number < 1 << 63:
            raise DataError(f"{what} holds a number of more than 64 bits; name such members '.txt'")
        return number
    if not pa.types.is_large_string(kind):
        return content
    try:
        return str(content, "utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{what} is no text in UTF-8 ({error.reason} at byte {error.start}); write it "
            "so, or give it an ending that is "
            "not read as text"
        ) from None
