"""Iterables that end: written once as shards by the driver, and then every row exactly once an
epoch, for any workers, under a kill; used again by a restart; and what is refused by name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from elastic_dp import ElasticTrainer, IterableData, ScalingConfig
from elastic_dp.config import CheckpointConfig, DataConfig
from elastic_dp.errors import DataError, RunMismatch, SpecError
from elastic_dp.materialization import materialized_rows
from elastic_dp.materialization.materialized_rows import materialized
from elastic_dp.storage import StorageURL
from tests.data.values import in_place
from tests.storage.servers import s3_options

ROWS, EPOCHS, V, B = 96, 2, 8, 3


def row(i: int) -> dict[str, Any]:
    return {
        "id": i,
        "x": torch.full((2, 3), i, dtype=torch.float32),
        "tokens": np.arange(i % 4 + 1, dtype=np.int32),
        "text": f"é {i}",
        "raw": bytes([i % 256]),
        "list": [i, -i],
        "flag": i % 2 == 0,
        "maybe": None if i % 5 else f"m{i}",
    }


class Stream(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    def __init__(self, rows: int = ROWS) -> None:
        self.rows, self.read = rows, 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.read += 1
        return map(row, range(self.rows))


def data_of(dataset: Any, **options: Any) -> IterableData:
    return IterableData(dataset, **({"micro_batch_size": B, "fingerprint": "v1"} | options))


def written(data: IterableData, folder: Path | str, said: list[str] | None = None) -> DataConfig:
    say = print if said is None else said.append
    return materialized(data, StorageURL(str(folder)), say)


def test_rows_of_an_iterable_are_read_back_with_their_values(tmp_path):
    said: list[str] = []
    config = written(data_of(Stream()), tmp_path, said)
    found = in_place(config)
    for i in range(ROWS):
        wanted = row(i)
        for name, value in wanted.items():
            value = value.tolist() if isinstance(value, torch.Tensor | np.ndarray) else value
            assert found[name][i] == value, name
    assert "writing the rows of Stream to" in said[0]
    assert "wrote 96 rows (" in said[-1] and "bytes, fingerprint 'v1')" in said[-1]


def only_ids(batch: dict[str, Any], rng: Any) -> dict[str, Any]:
    assert batch["x"].tolist() == [[[i] * 3] * 2 for i in batch["id"].tolist()]
    assert [*batch["text"]] == [f"é {i}" for i in batch["id"].tolist()]
    return {"id": batch["id"]}


def short_train(ctx: Any) -> None:
    model = torch.nn.Linear(1, 1)

    def loss_fn(m: Any, batch: Any) -> torch.Tensor:
        return m(batch["id"].float()[:, None] / 100).square().mean()

    for _ in ctx.steps(model, torch.optim.SGD(model.parameters(), lr=1e-3), loss_fn):
        pass


def trainer(folder: Path, data: IterableData, **options: Any) -> ElasticTrainer:
    return ElasticTrainer(
        short_train,
        data=data,
        name="r",
        storage_path=folder,
        scaling=ScalingConfig(max_workers=2, virtual_workers=V, threads_per_worker=1),
        checkpoint=CheckpointConfig(every_steps=2),
        **options,
    )


def events_of(run: Path) -> str:
    return "".join(file.read_text() for file in run.rglob("*.jsonl"))


def test_a_run_that_is_started_again_reads_the_rows_that_it_has_written(tmp_path, capfd):
    stream = Stream()
    first = trainer(tmp_path / "two", data_of(stream, transform=only_ids), max_steps=3)
    assert first.fit(local=True).step == 3
    again = trainer(tmp_path / "two", data_of(stream, transform=only_ids), max_steps=6)
    resumed = again.fit(local=True)
    assert stream.read == 1
    assert "wrote 96 rows (" in capfd.readouterr().err
    assert "wrote 96 rows (" in events_of(tmp_path / "two/r")
    assert resumed.step == 6
    other = trainer(tmp_path / "two", data_of(stream, fingerprint="v2"), max_steps=9)
    with pytest.raises(RunMismatch, match=r"IterableData\.fingerprint is 'v2', but .* 'v1'"):
        other.fit(local=True)
    assert stream.read == 1


def test_an_incomplete_attempt_is_not_read_and_is_deleted_by_the_next(tmp_path):
    """A kill leaves shards, also complete ones, that `rows.json` does not name."""
    rows = tmp_path / "rows"
    for name in ("rows-00000000000000aa", "rows-00000000000000bb"):
        (rows / name).mkdir(parents=True)
        (rows / name / "part-00000.parquet").write_bytes(b"PAR1 cut off")
        (rows / name / "_incomplete").write_text("")
    (rows / "mine.txt").write_text("of the user")
    config = written(data_of(Stream()), tmp_path)
    assert in_place(config)["id"] == list(range(ROWS))
    files = sorted(path.name for path in rows.rglob("*") if path.is_file())
    assert files == ["mine.txt", "part-00000.parquet", "rows.json"]


def test_an_iterable_that_raises_leaves_nothing_and_is_read_again(tmp_path):
    class Failing(Stream):
        def __iter__(self) -> Iterator[dict[str, Any]]:
            self.read += 1
            yield from map(row, range(self.rows))
            if self.read == 1:
                raise OSError("the connection is gone")

    stream = Failing(2000)  # so that some rows are written before
    with pytest.raises(OSError, match="the connection is gone") as caught:
        written(data_of(stream), tmp_path)
    assert "after 2,000 rows, before training started" in caught.value.__notes__[0]
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    assert in_place(written(data_of(stream), tmp_path))["id"] == list(range(2000))
    assert stream.read == 2


def test_two_drivers_at_once_the_first_to_finish_wins_and_the_other_uses_its_rows(tmp_path):
    def slow() -> Iterator[dict[str, Any]]:
        written(data_of(Stream()), tmp_path)  # another driver begins and ends meanwhile
        yield from map(row, range(ROWS))

    said: list[str] = []
    config = written(data_of(slow), tmp_path, said)
    assert "another driver has written 96 rows" in said[-1]
    assert in_place(config)["id"] == list(range(ROWS))
    assert len([*(tmp_path / "rows").rglob("*.parquet")]) == 1


def test_shards_that_are_gone_are_refused_by_name(tmp_path):
    config = written(data_of(Stream()), tmp_path)
    (shard,) = Path(str(config.url)).iterdir()
    shard.unlink()
    with pytest.raises(DataError, match=r"has 0 files of 0 bytes together, and 1 of "):
        written(data_of(Stream()), tmp_path)


def test_rows_in_a_folder_are_shared_by_runs_also_on_s3(tmp_path, moto):
    from tests.train.test_exactly_once import send

    send(moto, "iterable", b"")
    for folder, options in ((str(tmp_path / "{a,b}"), None), ("s3://iterable/f", s3_options(moto))):
        stream = Stream()
        data = data_of(stream, folder=folder, storage_options=options)
        one, other = (written(data, tmp_path / name) for name in ("run-1", "run-2"))
        assert stream.read == 1 and one.url == other.url
        assert in_place(one)["id"] == list(range(ROWS))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([(1, 2)], "row 0 is a tuple, must be a dict of tensors"),
        ([{"x": 1}, {"x": "a"}], "'x' is string in row 1, and int64 in earlier rows"),
        ([{"x": 1}, {"x": 1, "y": 2}], "row 1 has the key 'y', unlike the first row"),
        ([{"x": 1, "y": 2}, {"x": 1}], "row 1 lacks the key 'y', unlike the first row"),
        ([{"x": {"y": 1}}], r"'x' of row 0 is dict, must be one of tensors"),
        ([{"x": object()}], r"'x' of row 0 is object, must be one of tensors"),
        ([{"x": np.array(["a"])}], r"'x' of row 0 is an array of <U1"),
        ([{"x": torch.ones(1, dtype=torch.bfloat16)}], "is a tensor of torch.bfloat16"),
        ([{"x": None}], "'x' has no value in the first 1 rows"),
        ([{"x": []}], "'x' has no value in the first 1 rows"),
        ([{"x": [1, "a"]}], "the list 'x' of row 0 has int64 and string"),
        ([{"x": 0.5}, {"x": 2**60 + 1}], "'x' of rows 0 to 1 cannot be stored as double"),
        (
            [{"x": np.array([0.5])}, {"x": np.array([2**53 + 1])}],
            "'x' of rows 0 to 1 cannot be stored as list<item: double>",
        ),
        ([{"x": np.ma.array([1, 2], mask=[0, 1])}], "'x' of row 0 is a masked array"),
        ([{"x": 2**70}], "'x' of rows 0 to 0 cannot be stored as int64"),
        ([{1: 2}], r"row 0 has the keys \[1\]"),
        ([{"x": np.ones(2)}, {"x": np.ones((2, 2))}], "'x' is list<.*> in row 1"),
        ([], "gives no row"),
    ],
)
def test_items_that_are_no_rows_are_refused_by_name(rows, message, tmp_path):
    with pytest.raises(DataError, match=message):
        written(data_of(rows), tmp_path)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_types_of_later_rows_are_refused_and_not_converted(tmp_path):
    rows = [{"x": i} for i in range(2000)] + [{"x": 0.5}]
    with pytest.raises(DataError, match="'x' is double in row 2000, and int64 in earlier rows"):
        written(data_of(rows), tmp_path)
    mixed = [{"x": 0.5}, *({"x": i} for i in range(2000))]
    assert in_place(written(data_of(mixed), tmp_path))["x"] == [0.5, *map(float, range(2000))]


def test_buffers_that_an_iterable_uses_again_are_copied(tmp_path):
    def reused() -> Iterator[dict[str, Any]]:
        x, t = np.zeros(2), torch.zeros(2)
        for i in range(5):
            x[:], t[:] = i, i
            yield {"x": x, "t": t, "of": x[0]}

    found = in_place(written(data_of(reused), tmp_path))
    assert found["x"] == found["t"] == [[i, i] for i in range(5)]
    assert found["of"] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("dataset", "options", "message"),
    [
        (iter([]), {}, "is a list_iterator, which can be read only once: pass the function"),
        ({"train": []}, {}, "is a dict, must give dicts"),
        ("s3://x", {}, "is a str, must give dicts"),
        (3, {}, "is a int, must be an iterable, or a function"),
        ([], {"fingerprint": ""}, "fingerprint is '', must be a string that changes"),
        ([], {"max_rows": 5}, r"IterableData: max_rows= does not exist any more: end the iterable"),
        ([], {"workers": -1}, r"IterableData\.workers is -1, must be at least 0"),
        ([], {"storage_options": {"key": "k"}}, "storage_options is set, but folder is not"),
        ([], {"folder": ""}, "folder is '', must be a path or URL"),
    ],
)
def test_iterable_data_that_is_wrong_is_refused_by_name(dataset, options, message):
    with pytest.raises(SpecError, match=message):
        data_of(dataset, **options)


def test_hugging_face_streams_are_written(tmp_path):
    datasets = pytest.importorskip("datasets")
    source = datasets.Dataset.from_list([{"id": i, "text": f"t{i}"} for i in range(ROWS)])
    stream = source.to_iterable_dataset(num_shards=3).map(lambda r: {"twice": 2 * r["id"]})
    found = in_place(written(data_of(stream), tmp_path))
    assert found["id"] == list(range(ROWS)) and found["twice"] == [2 * i for i in range(ROWS)]


def test_rows_json_is_what_later_versions_read(tmp_path):
    written(data_of(Stream()), tmp_path)
    (committed,) = (tmp_path / "rows").glob("*.json")
    stored = json.loads(committed.read_text())
    assert committed.name == materialized_rows._COMMITTED
    assert stored.keys() == {"format", "fingerprint", "attempt", "rows", "shards", "nbytes"}
    assert (stored["format"], stored["fingerprint"], stored["rows"]) == (1, "v1", ROWS)
