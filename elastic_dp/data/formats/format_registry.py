"""The formats of shards, by name. A new one implements `FileFormat` and is added here."""

from __future__ import annotations

from elastic_dp.config.csv_options import CsvOptions
from elastic_dp.data.formats.arrow import Arrow
from elastic_dp.data.formats.csv import Csv
from elastic_dp.data.formats.file_format import FileFormat
from elastic_dp.data.formats.jsonl import JsonLines
from elastic_dp.data.formats.litdata import LitData
from elastic_dp.data.formats.litdata_index import is_chunk
from elastic_dp.data.formats.mds import Mds
from elastic_dp.data.formats.parquet import Parquet
from elastic_dp.data.formats.tar import Tar

FORMATS: dict[str, type[FileFormat]] = {
    chosen.name: chosen for chosen in (Parquet, Arrow, JsonLines, Csv, Tar, Mds, LitData)
}


def open_format(name: str, csv: CsvOptions) -> FileFormat:
    return Csv(csv) if name == Csv.name else FORMATS[name]()


def format_of(name: str) -> str:
    """The format that the file's ending names; "" if the ending is of no format. Files of many
    programs end in .bin, so those of litdata must have the names that it gives to chunks."""
    lower = name.lower()
    found = next((f.name for f in FORMATS.values() if lower.endswith(f.endings)), "")
    return "" if found == LitData.name and not is_chunk(lower) else found
