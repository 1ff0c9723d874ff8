"""A block source of the user's: its rows, once each, with every option that shards have."""

import dataclasses
import pickle
import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from elastic_dp.config import DataConfig
from elastic_dp.data import BlockSource, open_data, open_evaluation, read_index
from elastic_dp.errors import BadShard, DataError, SpecError, StorageError
from tests.data.test_rows_in_rows_out import dealt, evaluated

PAGE = Path(__file__).parents[2] / "docs" / "preparing-data.md"
SCHEMA = pa.schema({"id": pa.int64(), "tokens": pa.list_(pa.int32()), "s": pa.string()})


@dataclasses.dataclass
class Numbers:
    rows: Sequence[int] = (7, 0, 11, 6, 24)
    identity: str = "numbers of version 1"
    schema: pa.Schema = SCHEMA
    broken: int | None = None

    @property
    def stored_bytes(self):
        return [100 * rows for rows in self.rows]

    def read(self, block, columns):
        if block == self.broken:
            raise ValueError("a bad block")
        first = sum(self.rows[:block])
        ids = range(first, first + self.rows[block])
        made = {
            "id": ids,
            "tokens": [[i] * (1 + i % 3) for i in ids],
            "s": [f"row {i}" for i in ids],
        }
        return pa.table(made, SCHEMA).select(columns)


def config(source=None, **changes):
    options = {"micro_batch_size": 3, "columns": ["id", "s"], **changes}
    return DataConfig(source or Numbers(), **options)


@pytest.mark.parametrize("shuffle", ["none", "rows", "full"])
def test_each_row_comes_once_for_one_worker_and_for_three(shuffle):
    wanted = config(shuffle=shuffle, tail="short")
    alone = dealt(wanted, 1)
    assert alone == dealt(wanted, 3)
    rows = sorted((row for step in alone for row in step), key=lambda row: row["id"])
    assert rows == [{"id": i, "s": f"row {i}"} for i in range(48)]
    assert evaluated(wanted, 1) == rows
    assert isinstance(Numbers(), BlockSource)


def test_filter_and_packing_are_those_of_shards():
    even = config(filter=pc.bit_wise_and(pc.field("id"), 1) == 0, columns=["s"], tail="short")
    assert read_index(even).num_rows == 24
    found = [row["s"] for step in dealt(even, 1) for row in step]
    assert sorted(found) == sorted(f"row {i}" for i in range(0, 48, 2))
    packed = config(pack=8, columns=["tokens"], micro_batch_size=1, shuffle="none")
    data = open_data(packed, virtual_workers=1)
    assert data.batch(1, 0)["tokens"].tolist() == [[0, 1, 1, 2, 2, 2, 3, 4]]


def test_identity_and_rows_are_what_a_run_remembers():
    def fingerprint(source):
        data = open_data(config(pickle.loads(pickle.dumps(source))), virtual_workers=2)
        return data.fingerprint

    assert fingerprint(Numbers()) == fingerprint(Numbers())
    others = (Numbers(identity="version 2"), Numbers(rows=(7, 0, 11, 6, 25)))
    assert len({fingerprint(source) for source in (Numbers(), *others)}) == 3


def test_a_block_that_cannot_be_read_fails_or_is_skipped_and_named():
    for max_bad_fraction in (0, 1):
        wanted = config(Numbers(broken=2), max_bad_fraction=max_bad_fraction)
        data = open_evaluation(wanted)
        found = []
        if not max_bad_fraction:
            with pytest.raises(BadShard, match=r"numbers of version 1.*a bad block"):
                [data.batch(number) for number in range(data.num_batches)]
        else:
            made = [data.batch(number) for number in range(data.num_batches)]
            found = [i for batch in made if batch is not None for i in batch["id"].tolist()]
            assert found == [*range(7), *range(18, 48)]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda table: table.to_pylist(), r"read\(\) returned a list, not a Table"),
        (lambda table: table.drop_columns("s"), r"read\(\) returned no column 's'"),
        (lambda table: table.slice(1), "has 6 rows, and had 7"),
        (
            lambda table: table.set_column(0, "id", table["id"].cast(pa.int32())),
            "returned column 'id' as int32, and the schema of the source says int64",
        ),
    ],
)
def test_a_source_that_breaks_its_word_is_named(make, words, monkeypatch):
    read = Numbers.read
    monkeypatch.setattr(Numbers, "read", lambda self, *asked: make(read(self, *asked)))
    data = open_evaluation(config())
    with pytest.raises((DataError, BadShard), match=words):
        data.batch(0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"schema": {"id": "int64"}}, "schema of a block source is a dict, must be a pyarrow.Sch"),
        ({"rows": (7, None)}, r"rows of a block source must be .* and is \(7, None\)"),
        ({"rows": (7, 4.5)}, "rows of a block source must be a list of whole numbers"),
        ({"rows": (7, -1)}, "rows of a block source must be"),
        ({"stored_bytes": 100}, "stored_bytes of a block source must be .* and is 100"),
        ({"stored_bytes": (7,)}, "has 5 rows and 1 stored_bytes, must have one of each"),
    ],
)
def test_blocks_that_are_no_numbers_are_refused_by_name(changes, words):
    source = SimpleNamespace(**vars(Numbers()), stored_bytes=[1, 1], read=None)
    vars(source).update(changes)
    with pytest.raises(DataError, match=words):
        read_index(config(source))


def test_a_source_that_cannot_be_reached_has_no_bad_blocks(monkeypatch):
    def read(*_):
        raise ConnectionError("refused")

    monkeypatch.setattr(Numbers, "read", read)
    data = open_evaluation(config(max_bad_fraction=1))
    with pytest.raises(StorageError, match="cannot read numbers of version 1: refused"):
        data.batch(0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"source": Numbers(identity="")}, "identity of the source is ''"),
        ({"source": object()}, "or a block source, with identity, rows, stored_bytes, schema"),
        ({"cache_dir": "/tmp/x", "cache_bytes": 1 << 20}, "cache_dir is set, and url is a block"),
        ({"storage_options": {}}, "storage_options is set, and url is a block source"),
    ],
)
def test_options_that_a_source_cannot_take_are_refused(options, words):
    with pytest.raises(SpecError, match=words):
        config(**options)


def test_source_of_the_page_is_trained_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "archives").mkdir()
    for number in range(3):
        y = np.arange(number * 10, number * 10 + 10)
        np.savez(tmp_path / "archives" / f"{number}.npz", x=np.tile(y[:, None], 4), y=y)
    (code,) = (c for c in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S) if "npz" in c)
    assert len(code[code.index("class ") : code.index("def data")].splitlines()) <= 40
    space = {}
    exec(code, space)
    wanted = dataclasses.replace(space["data"](), epochs=1)
    steps = dealt(wanted, 1)
    assert steps == dealt(wanted, 3)
    rows = [row for step in steps for row in step]
    assert len({row["y"] for row in rows}) == len(rows)
    assert all(row["x"] == [float(row["y"])] * 4 for row in rows)
