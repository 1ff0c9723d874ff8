"""Files of every producer are read as the producer reads them, or refused by name."""

from pathlib import Path

import pyarrow as pa
import pytest

from elastic_dp.config import DataConfig
from elastic_dp.data import read_index
from tests.data.values import columns_of, in_place, same
from tests.data.zoo import ZOO, At

READ = [name for name, cell in ZOO.items() if cell.error is None]
REFUSED = [name for name, cell in ZOO.items() if cell.error is not None]


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
    source = tmp_path / "source"
    source.mkdir()
    url, rows = made(name, source)
    check_rows(in_place(DataConfig(url, micro_batch_size=4, **ZOO[name].options)), rows)


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
