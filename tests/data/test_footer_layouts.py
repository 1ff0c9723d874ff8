"""A Parquet footer of a layout that was checked is read without a check, and gives what it gives
with one."""

from dataclasses import astuple
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from elastic_dp.data.formats import footer_layouts
from elastic_dp.data.formats import parquet as parquet_format
from elastic_dp.data.formats.file_format import Scan, ShardAt
from elastic_dp.data.formats.parquet import Parquet
from elastic_dp.storage import Store
from tests.data.fuzz import thrift

TABLES = {
    "numbers": pa.table({"x": [1.5, None, 2.5, 3.5], "y": [1, 2, 3, 4]}),
    "lists": pa.table({"t": [[1], [], [2, 3], [4]], "b": [True, None, False, True]}),
    "texts": pa.table({"s": ["a", "bc", "a", None], "f": pa.array([b"ab"] * 4, pa.binary(2))}),
}


@pytest.fixture
def checks(monkeypatch) -> list[int]:
    """The lengths of the footers that were checked."""
    lengths: list[int] = []
    check = parquet_format.refuse_what_ends_the_process

    def counted(tail, footer):
        lengths.append(len(tail))
        check(tail, footer)

    monkeypatch.setattr(parquet_format, "refuse_what_ends_the_process", counted)
    return lengths


def scan(chosen: Parquet, path: Path, columns: list[str] | None = None) -> Scan:
    store = Store(str(path.parent))
    return chosen.scan(ShardAt(store, str(path), path.stat().st_size, "", path.name), columns)


def outcome(chosen: Parquet, path: Path) -> str:
    try:
        return repr(astuple(scan(chosen, path)))
    except Exception as error:  # as for who calls `scan`
        return f"{type(error).__name__}: {error}"


def write(path: Path, table: pa.Table) -> Path:
    pq.write_table(table, path, row_group_size=2, store_schema=False)
    return path


def test_footers_that_differ_in_numbers_and_bounds_are_checked_once(tmp_path, checks):
    chosen = Parquet()
    for number in range(3):
        rows = [number + 0.5, None, 2.0 + number, 3.0]
        write(tmp_path / f"{number}", pa.table({"x": rows, "y": [1, 2, 3, 40 * number]}))
        found = scan(chosen, tmp_path / f"{number}")
        assert repr(astuple(found)[5:]) == repr(
            astuple(scan(Parquet(), tmp_path / f"{number}"))[5:]
        )
    assert len(checks) == 1 + 3


@pytest.mark.parametrize("columns", [["y"], ["x", "y"]])
def test_footer_is_checked_again_for_other_columns(columns, tmp_path, checks):
    path = write(tmp_path / "a", TABLES["numbers"])
    chosen = Parquet()
    scan(chosen, path, ["x"])
    expected = scan(Parquet(), path, columns)
    found = scan(chosen, path, columns)
    assert found.nbytes.tolist() == expected.nbytes.tolist()
    assert found.starts.tolist() == expected.starts.tolist()
    assert len(checks) == 3


def test_layouts_that_are_kept_have_a_limit(tmp_path, checks, monkeypatch):
    monkeypatch.setattr(footer_layouts, "LAYOUTS_KEPT", 2)
    chosen = Parquet()
    paths = [write(tmp_path / name, table) for name, table in TABLES.items()]
    for path in [*paths, *paths]:
        scan(chosen, path)
    assert len(checks) == 3 + 1


def outcomes_that_differ(path: Path, first: int, every: int) -> list[int]:
    """The bits of the footer that, flipped, change what becomes of it if its layout is known."""
    content = path.read_bytes()
    chosen, changed = Parquet(), []
    scan(chosen, path)
    end = 8 * (len(content) - 8)
    begin = end - 8 * int.from_bytes(content[-8:-4], "little")
    for bit in range(begin + first, end, every):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        if outcome(chosen, path) != outcome(Parquet(), path):
            changed.append(bit - begin)
    return changed


@pytest.mark.parametrize("name", TABLES)
def test_footer_with_a_bit_flipped_gives_the_same_with_a_known_layout(name, tmp_path):
    assert outcomes_that_differ(write(tmp_path / "a", TABLES[name]), 1, 11) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLES)
def test_footer_with_any_bit_flipped_gives_the_same_with_a_known_layout(name, tmp_path):
    assert outcomes_that_differ(write(tmp_path / "a", TABLES[name]), 0, 1) == []


@pytest.mark.parametrize(
    ("rows", "values", "is_known"), [(2, 2, True), (3, 3, True), (3, 2, False), (1, 2, False)]
)
def test_numbers_of_rows_and_values_are_compared_each_time(
    rows, values, is_known, tmp_path, checks
):
    path = write(tmp_path / "a", pa.table({"x": [1.5, 2.5]}))
    content = path.read_bytes()
    chosen = Parquet()
    scan(chosen, path)
    begin = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    footer, _ = thrift.decode(content[begin:-8])
    group = thrift.field(footer, 4)[1][0]
    chunk = thrift.field(group, 1)[1][0]
    metadata = [thrift.STRUCT, thrift.field(chunk, 3)]
    for struct, number, count in (group, 3, rows), (metadata, 5, values):
        node = next(node for found, node in struct[1] if found == number)
        node[1] = count
    path.write_bytes(content[:begin] + thrift.encode(footer) + content[-8:])
    outcome(chosen, path)
    assert len(checks) == (1 if is_known else 2)
