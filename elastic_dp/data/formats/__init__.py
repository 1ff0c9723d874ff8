"""The formats of shards, by name. Each implements `Format` (format.py)."""

from elastic_dp.data.formats.arrow import Arrow
from elastic_dp.data.formats.csv import Csv
from elastic_dp.data.formats.format import Format
from elastic_dp.data.formats.jsonl import JsonLines
from elastic_dp.data.formats.parquet import Parquet
from elastic_dp.data.formats.tar import Tar

FORMATS: dict[str, type[Format]] = {
    chosen.name: chosen for chosen in (Parquet, Arrow, JsonLines, Csv, Tar)
}
