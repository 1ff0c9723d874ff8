"""Files of every producer are read as the producer reads them, or refused by name."""

from pathlib import Path

import pyarrow as pa
import pytest

from elastic_dp.config import DataConfig
from elastic_dp.data import read_index
from elastic_dp.dataprep import convert, inspect
from elastic_dp.errors import DataError
from tests.data.values import columns_of, in_place, same
from tests.data.zoo import ZOO, At

READ = [name for name, cell in ZOO.items() if cell.error is None]
REFUSED = [name for name, cell in ZOO.items() if cell.error is not None]
# What training reads and convert refuses: in which words.
NOT_CONVERTED = {
    **dict.fromkeys((name for name in READ if "tar" in name or "webdataset" in name), "tar files"),
    "parquet_case": "differ by more than case",
    "spark_temporary": "has not finished",
}


def made(name, folder):
    """What to read, and the rows that must be there."""
    found = ZOO[name].make(folder)
    at = found if isinstance(found, At) else At(folder, found)
    rows = columns_of(at.rows) if isinstance(at.rows, pa.Table) else at.rows
    return str(at.url) if isinstance(at.url, Path) else at.url, rows


def check_rows(found, wanted):
    assert sorted(found) == sorted(wanted)
    for name, values in wanted.items():
        pairs = zip(found[name], values, strict=True)
        assert not [pair for pair in pairs if not same(*pair)], name


@pytest.mark.parametrize("name", READ)
def test_file_of_a_producer_has_the_rows_that_its_own_reader_has(name, tmp_path):
    source, options = tmp_path / "source", ZOO[name].options
    source.mkdir()
    url, rows = made(name, source)
    check_rows(in_place(DataConfig(url, micro_batch_size=4, **options)), rows)
    if isinstance(url, str):
        check_prepared(url, tmp_path / "converted", rows, name)


def check_prepared(url, converted, rows, name):
    """What trains is inspected without a fault, and converted, or refused by name."""
    options = ZOO[name].options
    columns = {"columns": options["columns"]} if "columns" in options else {}
    found = inspect(url, deep=True, **columns).findings
    assert not [finding for finding in found if finding.kind == "refused"], found
    if name in NOT_CONVERTED:
        with pytest.raises(DataError, match=NOT_CONVERTED[name]):
            convert(url, str(converted), **columns)
        return
    convert(url, str(converted), **columns)
    check_rows(in_place(DataConfig(str(converted), micro_batch_size=4, **options)), rows)


@pytest.mark.parametrize("name", REFUSED)
def test_file_of_a_producer_is_refused_by_name(name, tmp_path):
    source, cell = tmp_path / "source", ZOO[name]
    source.mkdir()
    url, _ = made(name, source)
    config = DataConfig(url, micro_batch_size=4, **cell.options)
    if cell.at_read:
        read_index(config)
    with pytest.raises(cell.error) as refused:
        (in_place if cell.at_read else read_index)(config)
    assert cell.words in str(refused.value), refused.value
