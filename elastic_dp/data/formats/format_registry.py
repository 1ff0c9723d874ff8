"""The formats of shards, by name. A new one implements `FileFormat` and is added here."""

from __future__ import annotations

from elastic_dp.config.csv_options import CsvOptions
from elastic_dp.data.formats.arrow import Arrow
from elastic_dp.data.formats.csv import Csv
from elastic_dp.data.formats.file_format import FileFormat
from elastic_dp.data.formats.jsonl import JsonLines
from elastic_dp.data.formats.mds import Mds
from elastic_dp.data.formats.parquet import Parquet
from elastic_dp.data.formats.tar import Tar

FORMATS: dict[str, type[FileFormat]] = {
    chosen.name: chosen for chosen in (Parquet, Arrow, JsonLines, Csv, Tar, Mds)
}


def open_format(name: str, csv: CsvOptions) -> FileFormat:
    return Csv(csv) if name == Csv.name else FORMATS[name]()


def format_of(name: str) -> str:
    """The format that the file's ending names; "" if the ending is of no format."""
    lower = name.lower()
    return next((f.name for f in FORMATS.values() if lower.endswith(f.endings)), "")
