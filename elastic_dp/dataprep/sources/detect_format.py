"""Finds the format of a source from the names of its files."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from elastic_dp.config.csv_options import CsvOptions
from elastic_dp.data.discovery.incomplete import unfinished_job
from elastic_dp.data.discovery.listing import splits_message
from elastic_dp.data.discovery.partitions import Partitions
from elastic_dp.data.discovery.saved_datasets import INFO, STATE
from elastic_dp.data.discovery.skipped_files import Skipped, count_skipped, skipped_message
from elastic_dp.data.formats.litdata_index import INDEX
from elastic_dp.dataprep.sources.documents import documents_of_column, documents_of_files
from elastic_dp.dataprep.sources.images import open_images
from elastic_dp.dataprep.sources.row_stream import Documents, Rows
from elastic_dp.dataprep.sources.source_files import Files, kind_of, list_files
from elastic_dp.dataprep.sources.tables import open_arrow, open_parquet, open_saved_dataset
from elastic_dp.dataprep.sources.text_lines import open_csv, open_jsonl
from elastic_dp.errors import DataError
from elastic_dp.storage import redact_url

_log = logging.getLogger(__name__)
_FORMATS = {
    **dict.fromkeys(("parquet", "pq", "parq"), "parquet"),
    **dict.fromkeys(("arrow", "feather", "ipc"), "arrow"),
    **dict.fromkeys(("jsonl", "ndjson", "json"), "jsonl"),
    **dict.fromkeys(("csv", "tsv"), "csv"),
    **dict.fromkeys(("jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff"), "images"),
    "txt": "text",
    "tar": "tar",
    "mds": "mds",
    "litdata": "litdata",
}
_NOTES = (STATE, INFO, "dataset_dict.json")  # of Hugging Face `datasets`
_OPENERS = {
    "parquet": open_parquet,
    "arrow": open_arrow,
    "jsonl": open_jsonl,
    "images": open_images,
    "saved": open_saved_dataset,
}


@dataclass(frozen=True)
class InputSource:
    """A source. `kind`: the format, or "saved" for a folder by `datasets.save_to_disk`. `files`:
    the files of that format. `skipped`: the other files. `csv`: how its CSV files are written."""

    url: str
    kind: str
    files: Files
    skipped: tuple[Skipped, ...] = ()
    csv: CsvOptions = field(default_factory=CsvOptions)


def find_source(
    url: str,
    text_globs: Sequence[str] = (),
    storage_options: Mapping[str, Any] | None = None,
) -> InputSource:
    """`text_globs`: read only the files that match one of these patterns, as text. Raises DataError
    if the format is unknown, or there are several."""
    files = list_files(url, text_globs, storage_options)
    if text_globs:
        read = files.matching(text_globs)
        if not read.names:
            raise DataError(
                f"no file at {redact_url(url)!r} matches "
                f"{' or '.join(map(repr, text_globs))} (text_glob); it has "
                f"{skipped_message(files.beside(read))}"
            )
        warn_of_rows(url, read)
        return InputSource(url, "text", read, files.beside(read))
    if "dataset_dict.json" in files.names:
        splits = sorted({name.split("/")[0] for name in files.names if "/" in name})
        raise DataError(
            f"{redact_url(url)!r} holds several splits ({', '.join(splits)}); convert one of "
            "them, e.g. "
            f"'{redact_url(url).rstrip('/')}/{splits[0] if splits else 'train'}'"
        )
    if {STATE, INFO} <= set(files.names):
        read = files.only(
            lambda name: name in _NOTES or ("/" not in name and kind_of(name) == "arrow")
        )
        warn_of_rows(url, read)
        return InputSource(url, "saved", read, files.beside(read))
    kind, read = find_format(url, files)
    return InputSource(url, kind, read, files.beside(read))


def open_rows(
    source: InputSource, columns: list[str] | None = None, *, partitions: bool = True
) -> Rows:
    """`partitions`: with partition columns, whose values are in the names of folders. Raises
    DataError if the source has no rows with columns."""
    if source.kind == "text":
        raise DataError(
            f"{redact_url(source.url)!r} is plain text, which has no columns; pack it: "
            "tokenizer=, pack="
        )
    if source.kind in ("tar", "mds", "litdata"):
        raise DataError(
            f"{redact_url(source.url)!r} holds {source.kind} shards, which convert does not read; "
            "training does, as they are"
        )
    folders = Partitions(source.files.names if partitions else ())
    if source.kind == "csv":
        return open_csv(source.files, columns, folders, source.csv)
    return _OPENERS[source.kind](source.files, columns, folders)


def open_documents(source: InputSource, columns: list[str] | None = None) -> Documents:
    """Documents of text: one for each .txt file, or one for each row of a column of text (`text`,
    unless `columns` names it)."""
    if source.kind == "text":
        return documents_of_files(source.files)
    rows, url = open_rows(source, columns, partitions=False), source.url
    texts = [
        f.name
        for f in rows.schema
        if pa.types.is_string(f.type) or pa.types.is_large_string(f.type)
    ]
    if columns is None and len(texts) > 1:
        texts = [name for name in texts if name == "text"]
    if len(texts) != 1 or (columns is not None and len(columns) != 1):
        raise DataError(
            f"{redact_url(url)!r} must have one column of text to pack; name it by columns. "
            "It has "
            f"{', '.join(f'{field.name!r} ({field.type})' for field in rows.schema)}"
        )
    return documents_of_column(rows, texts[0])


def find_format(url: str, files: Files) -> tuple[str, Files]:
    """(format, files of that format). Text files next to another format are taken for a README, and
    JSON files of Hugging Face `datasets` next to Arrow files, and of Streaming and litdata
    next to their shards, for a description."""
    names = files.names
    if any(kind_of(name) == "arrow" for name in names):
        names = tuple(name for name in names if name.rpartition("/")[2] not in _NOTES)
    if any(kind_of(name) in ("mds", "litdata") for name in names):
        names = tuple(name for name in names if name.rpartition("/")[2] != INDEX)
    kinds = Counter(_FORMATS[k] for name in names if (k := kind_of(name)) in _FORMATS)
    if len(kinds) > 1:
        kinds.pop("text", None)
    if len(kinds) != 1:
        there = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
        raise DataError(
            f"{redact_url(url)!r} holds several formats ({there}); name one by a glob such "
            "as '**/*.parquet'"
            if kinds
            else f"no file at {redact_url(url)!r} has an ending that is known: "
            f"{', '.join(_FORMATS)}. It has "
            f"{skipped_message(count_skipped(files.names, files.hidden))}. `elastic-dp data "
            "convert --text-glob` reads files of "
            "any name as text"
        )
    kind = next(iter(kinds))
    read = files.ending_in(*(ending for ending, owner in _FORMATS.items() if owner == kind))
    if words := splits_message(read.names, f"{files.root}/"):
        _log.warning("%r %s", redact_url(url), words)
    warn_of_rows(url, read)
    return kind, read


def warn_of_rows(url: str, read: Files) -> None:
    """Warns of rows that count twice or may be missing."""
    for words in (read.duplicates(), unfinished_job(read.hidden)):
        if words:
            _log.warning("%r: %s", redact_url(url), words)
