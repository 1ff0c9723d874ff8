"""docs/data-options.md: every option with the default that the code has, whether a run may change
it, and the numbers of the code and of the results."""

from __future__ import annotations

import dataclasses
import json
import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from elastic_dp.config import DataConfig, MapStyleData
from elastic_dp.data import open_data, open_evaluation
from elastic_dp.data.datasets.micro_batch_stream import AHEAD_PART, PRODUCERS, SLACK_PART
from elastic_dp.data.discovery.index import FOOTER_BYTES_KEPT
from elastic_dp.data.discovery.opened_source import FOOTERS_IN_FLIGHT
from elastic_dp.data.discovery.shard_scans import SCANS_IN_FLIGHT
from elastic_dp.data.formats.file_format import ShardAt
from elastic_dp.data.formats.format_registry import FORMATS
from elastic_dp.data.formats.parquet import TAIL_GUESS, Parquet
from elastic_dp.data.pipeline.micro_batch_plan import STEPS_AHEAD
from elastic_dp.data.pipeline.row_group_reader import READ_THREADS
from elastic_dp.errors import DataError
from elastic_dp.sampling.length_groups import WINDOW
from elastic_dp.sampling.order import OPEN_BYTES, STREAMS
from elastic_dp.storage import Store
from tests.data.shards import in_memory

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/data-options.md").read_text()
BEGIN, DATA_CONFIG, MAP_STYLE = re.split(r"^\| option \|.*\n\|[-|]*\n", PAGE, flags=re.M)
REQUIRED = "required"


def rows(table: str) -> list[list[str]]:
    """The cells of each row: option, default, and what follows."""
    lines = table.partition("\n\n")[0].splitlines()
    return [[cell.strip(" `") for cell in line.strip("|").split(" | ")] for line in lines]


def default_of(field: dataclasses.Field[Any]) -> Any:
    return REQUIRED if field.default is dataclasses.MISSING else field.default


def value_of(default: str) -> Any:
    return REQUIRED if default == REQUIRED else eval(default, {"__builtins__": {}})


def test_page_has_every_option_of_data_config_with_its_default():
    found = {name: value_of(default) for name, default, *_ in rows(DATA_CONFIG)}
    assert found == {field.name: default_of(field) for field in dataclasses.fields(DataConfig)}


def test_page_has_every_option_of_map_style_data_with_its_default():
    found = {name: value_of(default) for name, default, *_ in rows(MAP_STYLE)}
    shared = {"micro_batch_size", "epochs", "seed", "tail"}
    defaults = {field.name: default_of(field) for field in dataclasses.fields(MapStyleData)}
    assert found == {name: defaults[name] for name in defaults if name not in shared}
    of_data_config = {field.name: default_of(field) for field in dataclasses.fields(DataConfig)}
    assert all(defaults[name] == of_data_config[name] for name in shared)


def fingerprint(config: DataConfig) -> str:
    data = open_data(config, virtual_workers=2)
    try:
        return data.fingerprint
    finally:
        data.close()


def keep(batch: Any) -> Any:
    return batch


OTHER: dict[str, Any] = {  # another value of each option, or several options that go together
    "micro_batch_size": 3,
    "columns": ["x"],
    "source_column": "source",
    "filter": pc.field("x") > 3,
    "pack": {"pack": 8, "columns": ["tokens"]},
    "pack_columns": {"pack": 8, "columns": ["tokens"], "pack_columns": ()},
    "group_by_length": "tokens",
    "decode": {"image": "rgb"},
    "transform": keep,
    "collate_fn": keep,
    "workers": 1,
    "fill_nulls": {"y": 1.0},
    "epochs": 3,
    "seed": 7,
    "shuffle": "full",
    "tail": "short",
    "memory_bytes": 1 << 30,
    "cache_dir": {"cache_dir": "/tmp/never-written", "cache_bytes": 1 << 20},
    "cache_bytes": {"cache_dir": "/tmp/never-written", "cache_bytes": 1 << 21},
    "on_bad_shard": "skip",
    "max_bad_fraction": 0.5,
    "format": "parquet",
    "storage_options": {"auto_mkdir": False},
}
APART = {"url", "csv_options", "source_options"}  # see below


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("rows")
    made = pa.table(
        {
            "x": range(40),
            "y": [None if i % 5 == 0 else float(i) for i in range(40)],
            "tokens": [[1] * (1 + i % 4) for i in range(40)],
            "image": pa.array([b"x"] * 40, pa.binary()),
        }
    )
    pq.write_table(made, place / "a.parquet", row_group_size=7)
    return place


@pytest.mark.parametrize("name", OTHER)
def test_options_marked_as_fixed_are_those_that_change_what_a_run_remembers(name, folder):
    plain = DataConfig(str(folder), micro_batch_size=2, fill_nulls={"y": 0.0})
    other = OTHER[name]
    many = isinstance(other, dict) and name in other
    changed = dataclasses.replace(plain, **(other if many else {name: other}))
    if name == "pack":  # beside the same columns without it
        plain = dataclasses.replace(plain, columns=other["columns"], fill_nulls=None)
        changed = dataclasses.replace(changed, fill_nulls=None)
    if name == "pack_columns":
        plain, changed = (dataclasses.replace(c, fill_nulls=None) for c in (plain, changed))
        plain = dataclasses.replace(plain, pack=8, columns=["tokens"])
    if name == "columns":
        plain, changed = (dataclasses.replace(c, fill_nulls=None) for c in (plain, changed))
        plain = dataclasses.replace(plain, columns=["x", "tokens"])
    (what,) = [row[2] for row in rows(DATA_CONFIG) if row[0] == name]
    assert what.endswith("; fixed") == (fingerprint(plain) != fingerprint(changed))


def test_data_at_another_url_is_the_same_and_other_data_is_not(folder, tmp_path):
    (copy := tmp_path / "copy").mkdir()
    (copy / "a.parquet").write_bytes((folder / "a.parquet").read_bytes())
    plain = DataConfig(str(folder), micro_batch_size=2, columns=["x"])
    assert fingerprint(plain) == fingerprint(dataclasses.replace(plain, url=str(copy)))
    pq.write_table(pa.table({"x": np.arange(41)}), copy / "a.parquet")
    assert fingerprint(plain) != fingerprint(dataclasses.replace(plain, url=str(copy)))


def test_csv_options_are_fixed(tmp_path):
    (tmp_path / "a.csv").write_text("x\n" + "1\n" * 9)
    plain = DataConfig(str(tmp_path), micro_batch_size=2)
    changed = dataclasses.replace(plain, csv_options={"null_values": ["n/a"]})
    assert fingerprint(plain) != fingerprint(changed)


def test_options_of_sources_are_fixed_but_for_the_transform(folder):
    plain = DataConfig({str(folder): 1}, micro_batch_size=2, columns=["x", "tokens"])

    def with_options(**options: Any) -> str:
        return fingerprint(dataclasses.replace(plain, source_options={str(folder): options}))

    assert with_options(columns=["x"]) != fingerprint(plain)
    assert with_options(transform=lambda batch, rng: batch) == fingerprint(plain)


def test_each_option_is_compared_with_another_value():
    assert {*OTHER} | APART == {field.name for field in dataclasses.fields(DataConfig)}
    for name, _, what, *_ in rows(DATA_CONFIG):
        assert name not in APART or what.endswith("; fixed")


# ------------------------------------------------------------------------ costs, and who runs what


def requests_of_a_scan(folder: Path, name: str) -> int:
    store = Store(in_memory(folder))
    shard = ShardAt(store, f"{store.path}/{name}", (folder / name).stat().st_size, "", name)
    FORMATS[name.partition(".")[2]]().scan(shard, None)
    return store.counts.requests


def test_opening_parquet_takes_one_request_a_shard_or_two_and_arrow_one_for_each_batch(tmp_path):
    made = pa.table({f"column {i}": np.arange(1000.0) for i in range(40)})
    pq.write_table(made, tmp_path / "short.parquet")
    pq.write_table(made, tmp_path / "long.parquet", row_group_size=50)
    assert requests_of_a_scan(tmp_path, "short.parquet") == 1
    assert requests_of_a_scan(tmp_path, "long.parquet") == 2
    counts = []
    for batches in (2, 10):
        (folder := tmp_path / str(batches)).mkdir()
        with pa.ipc.new_file(folder / "a.arrow", made.schema) as file:
            file.write_table(made, max_chunksize=1000 // batches)
        counts.append(requests_of_a_scan(folder, "a.arrow"))
    assert counts[1] - counts[0] == 8


def test_shuffle_full_is_refused_when_opened_without_memory_for_all_rows(tmp_path):
    made = pa.table({"x": np.random.default_rng(0).random(1 << 18)})
    pq.write_table(made, tmp_path / "a.parquet", row_group_size=1 << 13)
    plain = DataConfig(str(tmp_path), micro_batch_size=2, memory_bytes=1 << 20)
    fingerprint(dataclasses.replace(plain, shuffle="none"))
    with pytest.raises(DataError, match=r"32 row groups open, .* raise that to at least"):
        fingerprint(dataclasses.replace(plain, shuffle="full"))


def test_code_that_may_draw_from_global_generators_runs_in_the_thread_that_asks(folder):
    threads = []

    def note(batch: Any) -> Any:
        threads.append(threading.current_thread())
        return batch

    config = DataConfig(str(folder), micro_batch_size=2, columns=["x"])
    data = open_data(
        dataclasses.replace(config, transform=note, collate_fn=note), virtual_workers=2
    )
    data.read_ahead(1, [0, 1])
    data.batch(1, 0)
    data.close()
    assert threads == [threading.current_thread()] * 2


def test_processes_are_only_for_code_of_training(folder):
    config = DataConfig(str(folder), micro_batch_size=2, columns=["x"], workers=3)
    for opened, number in (
        (open_data(config, virtual_workers=2), 0),
        (open_data(dataclasses.replace(config, transform=keep), virtual_workers=2), 3),
        (open_evaluation(dataclasses.replace(config, transform=keep)), 0),
    ):
        assert len(opened._stream._processes) == number  # type: ignore[union-attr]
        opened.close()


@pytest.mark.parametrize(
    "text",
    [
        f"{READ_THREADS} requests at a time from a store",
        f"{ {2: 'Two'}[PRODUCERS] } threads **make** micro-batches",
        f"at most { {4: 'four'}[STEPS_AHEAD] } steps ahead",
        f"longer than {TAIL_GUESS >> 10} KiB; {FOOTERS_IN_FLIGHT} shards at a time",
        f"all bytes of all shards, {SCANS_IN_FLIGHT} shards at a time",
        f"up to {FOOTER_BYTES_KEPT >> 20} MiB of footers",
        f"up to {STREAMS} V row groups, as many as fit into {OPEN_BYTES >> 20} MiB together",
        f"at most { {8: 'eight'}[STREAMS] } row groups",
        f"{WINDOW} micro-batches of each virtual worker",
        f"| 1/{AHEAD_PART} | micro-batches",
        f"| 1/{SLACK_PART} | what Arrow's allocator keeps",
        f"of Parquet {Parquet.growth} times",
        f"`memory_bytes` ({DataConfig.memory_bytes >> 30} GiB by default)",
    ],
)
def test_page_has_the_numbers_of_the_code(text):
    assert text in PAGE


def result(name: str) -> Any:
    return json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())["results"]


def test_page_has_what_was_measured():
    speeds = result("data")["local"]["rows_per_s"]
    order, shuffled = (
        round(speeds[f"parquet {kind}"]["median"], -3) for kind in ("in order", "shuffled")
    )
    assert f"came at {order:,.0f} a second in file order and at {shuffled:,.0f} with" in PAGE
    growth = [of["growth_to_budget"] for of in result("data")["memory"].values() if of_budget(of)]
    assert f"grows by {min(growth):.2f} to {max(growth):.2f} of `memory_bytes`" in PAGE
    cached = [of["ratio"] for of in result("data_cache").values() if type(of) is dict]
    assert f"came at {min(cached):.2f} to {max(cached):.2f} of the speed of local" in PAGE


def of_budget(measured: Any) -> bool:
    return type(measured) is dict and "growth_to_budget" in measured
