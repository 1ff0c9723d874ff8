"""Map-style datasets: the same order arithmetic, the user's own items."""

import importlib
import queue
import random
import re
import socket
import time

import cloudpickle
import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, random_split

from elastic_dp.config import MapStyleData
from elastic_dp.data import open_data, open_evaluation
from elastic_dp.data.datasets.map_style import probed_rows
from elastic_dp.data.pipeline.array_memory import ALIGNED_TO
from elastic_dp.data.pipeline.user_code_process import UserCodeProcess
from elastic_dp.device.global_generators import seed_everything
from elastic_dp.errors import ClusterError, DataError, UserCodeError
from elastic_dp.sampling.order import Order
from elastic_dp.sampling.seeds import batch_seed
from elastic_dp.threads import background
from tests.patience import PATIENCE_S, eventually

NUMBERS = TensorDataset(torch.arange(50), torch.arange(50) * 2)


def test_order_is_the_order_of_sampling():
    data = open_data(MapStyleData(NUMBERS, micro_batch_size=4, seed=9), virtual_workers=3)
    order = Order(group_rows=(50,), virtual_workers=3, micro_batch_size=4, seed=9, shuffle="full")
    assert data.steps_per_epoch == order.steps_per_epoch == 4
    for step in (1, 4, 5, 100):
        for virtual_worker in range(3):
            numbers, doubled = data.batch(step, virtual_worker)
            assert numbers.tolist() == order.locate(step, virtual_worker)[1].tolist()
            assert torch.equal(doubled, 2 * numbers)
            assert data.describe(step, virtual_worker).startswith(f"rows {numbers[0]}, ")


class Noisy(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        assert index != 63, "a broken image"
        return {"index": index, "noise": torch.rand(3), "other": random.random()}


def test_processes_give_the_same_bits_as_the_callers_thread(tmp_path, monkeypatch):
    """Also of a class in a module that is not where they look for modules."""
    (tmp_path / "only_in_this_folder.py").write_text(
        f"import {__name__} as t\nclass Here(t.Noisy): pass"
    )
    with monkeypatch.context() as path:
        path.syspath_prepend(tmp_path)
        only_in_this_folder = importlib.import_module("only_in_this_folder")
    here, there = (
        open_data(
            MapStyleData(only_in_this_folder.Here(), micro_batch_size=4, seed=5, workers=n),
            virtual_workers=2,
        )
        for n in (0, 2)
    )
    there.read_ahead(1, [1])
    for step in (1, 2, 2, 5, 3, 9):
        for v in (1, 0):
            seed_everything(batch_seed(5, step, v))
            try:
                expected = here.batch(step, v)
            except AssertionError:
                with pytest.raises(UserCodeError, match=rf"(?s)a broken image.*step {step}"):
                    there.batch(step, v)
            else:
                batch = there.batch(step, v)
                assert {n: t.tolist() for n, t in batch.items()} == {
                    n: t.tolist() for n, t in expected.items()
                }


def test_evaluation_in_order_with_a_short_last_batch():
    data = open_evaluation(MapStyleData(NUMBERS, micro_batch_size=8))
    assert [data.rows(i) for i in range(data.num_batches)] == [8] * 6 + [2]
    numbers = torch.cat([data.batch(i)[0] for i in range(data.num_batches)])
    assert numbers.tolist() == list(range(50))


def test_fingerprint_changes_with_data_and_settings():
    def fingerprint(rows=50, virtual_workers=2, **changes):
        config = MapStyleData(list(range(rows)), **({"micro_batch_size": 4} | changes))
        return open_data(config, virtual_workers=virtual_workers).fingerprint

    assert fingerprint() == fingerprint()
    others = fingerprint(51), fingerprint(50, 3), fingerprint(seed=1), fingerprint(fingerprint="2")
    assert len({fingerprint(), *others}) == 5
    tuple_of_them = MapStyleData(tuple(range(50)), micro_batch_size=4)
    assert open_data(tuple_of_them, virtual_workers=2).fingerprint != fingerprint()


def test_map_style_data_with_too_few_rows_is_refused():
    with pytest.raises(DataError, match="is empty"):
        open_data(MapStyleData([], micro_batch_size=4), virtual_workers=2)
    with pytest.raises(DataError, match="3 rows, fewer than one global batch of 8"):
        open_data(MapStyleData([1, 2, 3], micro_batch_size=4), virtual_workers=2)


class Slices(Dataset):
    """Fetches rows in a row as a piece of one tensor."""

    def __init__(self):
        self.x = torch.arange(150.0).reshape(50, 3)

    def __len__(self):
        return len(self.x)

    def __getitems__(self, indices):
        return self.x[indices[0] : indices[-1] + 1]


def as_fetched(items):
    return {"x": items, "both": [items, (items,)]}


@pytest.mark.parametrize("workers", [0, 1])
def test_tensors_begin_where_torchs_own_memory_does(workers):
    config = MapStyleData(
        Slices(), micro_batch_size=3, shuffle=False, collate_fn=as_fetched, workers=workers
    )
    data = open_data(config, virtual_workers=1)
    for step in range(1, 6):
        batch = data.batch(step, 0)
        for tensor in (batch["x"], batch["both"][0], batch["both"][1][0]):
            assert tensor.data_ptr() % ALIGNED_TO == 0
            assert tensor[0, 0] == 9 * (step - 1)
    if not workers:
        assert open_evaluation(config).batch(1)["x"].data_ptr() % ALIGNED_TO == 0


def test_items_are_as_many_as_the_rows_unless_collate_fn_knows_better():
    data = open_data(MapStyleData(Slices(), micro_batch_size=3), virtual_workers=1)
    with pytest.raises(DataError, match=r"__getitems__ returned \d+ items for 3 rows; return one"):
        [data.batch(step, 0) for step in range(1, 9)]


class Rows(Dataset):
    """`row(i)` of each row."""

    def __init__(self, row, rows=64):
        self.row, self.rows = row, rows

    def __len__(self):
        return self.rows

    def __getitem__(self, index):
        return self.row(index)


def odd(index):
    return {"x": torch.zeros(7 if index == 13 else 8)}


def broken(index):
    if index == 13:
        raise ValueError("no such file")
    return {"x": torch.zeros(8)}


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("row", "said"),
    [
        (odd, "row 13 of the dataset is .*float32 .7.*row 12 is .*float32 .8"),
        (broken, "row 13 of the dataset"),
    ],
)
def test_a_row_that_cannot_be_read_or_stacked_is_named(row, said, workers):
    config = MapStyleData(Rows(row), micro_batch_size=4, shuffle=False, workers=workers)
    data = open_data(config, virtual_workers=1)
    with pytest.raises((RuntimeError, ValueError, UserCodeError)) as error:
        data.batch(4, 0)
    notes = " ".join(getattr(error.value, "__notes__", ()))
    assert re.search(said, f"{error.value} {notes}")


def flipped(index):
    """A random transform: by the global generators of torch, NumPy and Python."""
    x = torch.arange(4.0) + index
    drawn = random.random() + np.random.random() + float(torch.rand(()))
    return {"x": x.flip(0) if drawn > 1.5 else x}


OWN = np.random.default_rng()


@pytest.mark.parametrize(
    ("row", "is_compared"),
    [
        (lambda i: {"x": torch.arange(4.0) + i, "y": i, "z": ["a", b"b", None, 1.5]}, True),
        (lambda i: (np.arange(3) * i, Image.new("RGB", (2, 2), (i, 0, 0))), True),
        (lambda i: torch.full((2,), i, dtype=torch.bfloat16), True),
        (flipped, True),
        (lambda i: OWN.random(), False),
        (lambda i: object(), False),
        (lambda i: {}["only in a worker"], False),
    ],
)
def test_rows_are_probed_so_that_other_rows_are_noticed(row, is_compared):
    """Also rows with random transforms, which are not refused for them."""
    config = MapStyleData(Rows(row), micro_batch_size=4)
    state = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    first, said = probed_rows(config)
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert all(
        torch.equal(a, b) if a is state[0] else a == b for a, b in zip(state, after, strict=True)
    )
    torch.rand(3), random.random(), np.random.random()
    assert probed_rows(config)[0] == first
    assert (len(first) > 3, bool(said)) == (is_compared, not is_compared)
    others = probed_rows(MapStyleData(Rows(lambda i: row(i + 1)), micro_batch_size=4))[0]
    assert not is_compared or all(others[number] != first[number] for number in first)
    named = MapStyleData(Rows(row), micro_batch_size=4, fingerprint="v1")
    assert probed_rows(named) == ({}, "")


def test_indices_of_subsets_are_part_of_the_fingerprint():
    def drawn(seed, **options):
        generator = torch.Generator().manual_seed(seed)
        half, _ = random_split(Subset(NUMBERS, range(40)), [20, 20], generator)
        config = MapStyleData(half, micro_batch_size=4, **options)
        joined = MapStyleData(ConcatDataset([half, half]), micro_batch_size=4, **options)
        return [open_data(c, virtual_workers=1).fingerprint for c in (config, joined)]

    assert drawn(0) == drawn(0)
    assert all(one != other for one, other in zip(drawn(0), drawn(1), strict=True))
    assert drawn(0, fingerprint="v1") == drawn(1, fingerprint="v1"), "the user says what it is"


def test_it_may_take_longer_than_the_default_timeout_that_user_code_has_set():
    process = UserCodeProcess("a process")
    socket.setdefaulttimeout(0.01)
    try:
        process.start(cloudpickle.dumps(lambda x: x + 1))
        assert process.run(1) == 2
    finally:
        socket.setdefaulttimeout(None)
        process.close()


def test_process_that_is_ended_in_a_call_of_another_thread_is_not_killed(tmp_path):
    """The thread kept its socket open; and where it had closed, the thread might use another file
    that got its descriptor."""
    begun, heard = tmp_path / "begun", queue.SimpleQueue()

    def call():
        with pytest.raises(ClusterError) as ended:
            process.run(begun)
        heard.put(str(ended.value))

    process = UserCodeProcess("a process")
    process.start(cloudpickle.dumps(lambda path: (path.touch(), time.sleep(PATIENCE_S))))
    background("call", call).start()
    eventually(begun.exists)
    process.end()
    assert "ended with exit code 0" in heard.get(timeout=PATIENCE_S)
    process.close()
