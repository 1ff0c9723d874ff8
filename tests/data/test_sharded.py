"""Micro-batches are the same whatever was planned, taken and read before, by whatever threads."""

import itertools
import os
import random
import signal
import subprocess
import sys
import threading

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from elastic_dp.config import DataConfig
from elastic_dp.data.datasets.micro_batch_stream import Evaluation
from elastic_dp.data.datasets.opening import check_memory, rows_in_file_order, stream_of
from elastic_dp.data.pipeline.array_memory import ALIGNED_TO
from elastic_dp.device.global_generators import seed_everything
from elastic_dp.errors import BadShard, ClusterError, DataError, SpecError, UserCodeError
from elastic_dp.sampling.order import Order
from elastic_dp.sampling.seeds import batch_seed, generator_for
from tests.data.row_groups import WIDTH, FakeRowGroups, resident_bytes
from tests.patience import eventually
from tests.short_plans import short_plans

V, B = 4, 8
SIZES = [70, 12, 45, 1, 30, 30, 9, 64]


def order_of(sizes=SIZES, **changes):
    return Order(
        group_rows=sizes,
        virtual_workers=V,
        micro_batch_size=B,
        seed=changes.pop("seed", 3),
        **changes,
    )


def opened(groups=None, order=None, **changes):
    config = DataConfig("fake://", **({"micro_batch_size": B, "seed": 3} | changes))
    groups = groups or FakeRowGroups(SIZES)
    shape = {"shuffle": config.shuffle, "tail": config.tail}
    return stream_of(config, groups, order or order_of(groups.rows, **shape))


def of_an_epoch(data):
    return itertools.product(range(1, data.steps_per_epoch + 1), range(V))


def expected(order, groups, step, v):
    found, rows = order.locate(step, v)
    return (groups.first[found] + rows).tolist()


def check(batch, ids):
    """Check rows, then write to them, as a loss function may: nobody else may see that."""
    assert batch["id"].tolist() == ids
    assert torch.equal(batch["tokens"][:, 0].to(torch.int64), batch["id"] * 100)
    assert batch["tokens"].shape == (len(ids), WIDTH)
    for tensor in batch.values():
        assert tensor.data_ptr() % ALIGNED_TO == 0, "products of matrices depend on it"
        tensor.fill_(-1)


actions = st.lists(
    st.one_of(
        st.tuples(st.just("ahead"), st.integers(1, 30), st.sets(st.integers(0, V - 1))),
        st.tuples(st.just("batch"), st.integers(0, 3), st.integers(0, V - 1)),
    ),
    max_size=40,
)


@given(actions, st.sampled_from(["none", "rows", "full"]), st.integers(0, 2), st.booleans())
@settings(max_examples=30)
def test_every_history_gives_the_same_micro_batches(history, shuffle, tightness, mapped):
    """Assignments come and go, steps are repeated and jumped over, memory is enough for one
    micro-batch or for all."""
    groups = FakeRowGroups(SIZES, mapped=mapped)
    order = order_of(shuffle=shuffle, tail="short")
    memory = [int(groups.nbytes.sum()), 1 << 20, 1 << 30][tightness]
    with short_plans():
        data = opened(groups, shuffle=shuffle, tail="short")
    data._pipeline.memory.limit = memory
    step = 1
    for what, number, who in history:
        if what == "ahead":
            step = number
            data.read_ahead(step, sorted(who))
        else:
            step = max(1, step + number - 1)
            if data.rows(step, who):
                check(data.batch(step, who), expected(order, groups, step, who))
    data.close()
    assert groups.live_bytes == 0
    assert groups.peak_bytes <= memory or not mapped


@pytest.mark.parametrize("size", [4 * B * V, 47 * B * V])
def test_file_order_hands_out_rows_as_they_were_decoded(size):
    """Only row groups that two chunks need are copied."""
    groups = FakeRowGroups([size] * 40, mapped=False)
    data = opened(groups, shuffle="none", epochs=1, tail="short")
    data.read_ahead(1, range(V))
    as_decoded = count = 0
    for step, v in of_an_epoch(data):
        if not data.rows(step, v):
            continue
        batch = data.batch(step, v)
        as_decoded += any(batch["tokens"].data_ptr() in memory for memory in groups.memory)
        count += 1
        check(batch, expected(data._order, groups, step, v))
    assert as_decoded > 0.85 * count


def test_few_rows_of_a_row_group_do_not_keep_it():
    """A worker that runs one of the virtual workers takes a quarter of each."""
    groups = FakeRowGroups([4 * B * V] * 40, mapped=False)
    data = opened(groups, shuffle="none", epochs=1)
    data.read_ahead(1, [1])
    for step in range(1, data.steps_per_epoch + 1):
        tokens = data.batch(step, 1)["tokens"]
        assert groups.memory
        assert not any(tokens.data_ptr() in memory for memory in groups.memory)


def test_several_epochs_in_one_chunk_share_no_memory():
    groups = FakeRowGroups([B * V], mapped=False)
    data = opened(groups, shuffle="none", epochs=20)
    data.read_ahead(1, range(V))
    for step in range(1, 21):
        for v in range(V):
            check(data.batch(step, v), expected(data._order, groups, step, v))


def test_memory_of_rows_handed_out_as_decoded_is_within_the_budget():
    """Rows that wait count, though no reader holds them any more."""
    groups = FakeRowGroups([64] * 400, row_bytes=1 << 12, mapped=False)
    memory = 40 * int(groups.nbytes[0])
    data = opened(groups, shuffle="none", epochs=1, memory_bytes=memory)
    data.read_ahead(1, range(V))
    eventually(lambda: len(groups.reads) >= 20)  # while the loop takes nothing
    for step, v in of_an_epoch(data):
        data.batch(step, v)
    assert 10 * int(groups.nbytes[0]) < groups.peak_bytes <= memory


def test_row_groups_in_memory_stay_when_virtual_workers_move():
    """Only streams of the virtual workers that came are read; those that stay read on."""
    groups = FakeRowGroups([256] * 64)
    data = opened(groups, epochs=1)
    data.read_ahead(1, [0, 1])
    for v in (0, 1):
        data.batch(1, v)
    wanted = {g for v in (0, 1) for s in range(2, 6) for g in data._order.locate(s, v)[0]}
    before = list(groups.reads)
    data.read_ahead(2, [0, 1, 2])
    for step in range(2, 6):
        for v in (0, 1, 2):
            data.batch(step, v)
    data.close()
    later = groups.reads[len(before) :]
    assert wanted & set(before) and later
    assert not [g for g in later if g in wanted and g in before]


def test_a_moved_virtual_worker_reads_one_row_group_of_each_of_its_streams_again():
    """Whoever takes it over reads what it had begun, and nothing that it had done with."""
    sizes, last = [64] * 256, 57
    order = order_of(sizes)
    left, came = FakeRowGroups(sizes), FakeRowGroups(sizes)
    old, new = opened(left, order), opened(came, order)
    new.last_step = last + 40  # before a stream's end, which lies where another one began
    old.read_ahead(1, range(V))
    for step in range(1, last + 1):
        for v in range(V):
            old.batch(step, v)
    new.read_ahead(last + 1, [2])
    for step in range(last + 1, last + 41):
        check(new.batch(step, 2), expected(order, came, step, 2))
    done = {g for step in range(1, last + 1) for g in order.locate(step, 2)[0].tolist()}
    assert 0 < len(done & set(came.reads)) <= order.streams // V
    assert len(came.reads) == len(set(came.reads))


def test_changed_share_locates_no_row_that_stays_again():
    """A generation that begins waits for it, so it must not cost by how much was planned."""
    data = opened(FakeRowGroups([1024] * 600))
    data.read_ahead(1, range(V))
    planner = data._pipeline._planner
    eventually(lambda: min(planner.cursors.values(), default=0) > 1000)
    located = []
    locate = data.locate
    planned_to = min(planner.cursors.values())
    data.locate = lambda steps, v: located.append(steps.start) or locate(steps, v)
    data.read_ahead(1, [1, 2])
    eventually(lambda: located)
    assert all(step >= planned_to for step in located)
    check(data.batch(1, 2), expected(data._order, data._row_groups, 1, 2))


@pytest.mark.parametrize(
    ("shuffle", "at_once", "reads"), [("none", 1, 1.1), ("none", 2, 1.1), ("rows", 33, 2)]
)
def test_a_budget_of_exactly_what_is_open(shuffle, at_once, reads):
    """Each row group is read once, or, where it lies in two streams, for each."""
    groups = FakeRowGroups([64] * 40, row_bytes=1 << 15)
    order = order_of(groups.rows, shuffle=shuffle)
    floor = at_once * int(groups.nbytes[0])
    check_memory(groups, order, floor)
    data = opened(groups, order, shuffle=shuffle, memory_bytes=floor)
    data.read_ahead(1, range(V))
    for step, v in of_an_epoch(data):
        check(data.batch(step, v), expected(order, groups, step, v))
    assert groups.peak_bytes <= floor
    assert len(groups.reads) <= reads * 40


def test_the_budget_is_what_the_process_grows_by():
    """Row groups of 16 MiB, a budget of 128: all of them pass through it. In a process without a
    past."""
    code = "from tests.data import test_sharded; print(test_sharded.growth())"
    command = [sys.executable, "-c", code]
    # What is freed goes back at once: else it depends on the threads' turns how much libc and Arrow
    # keep.
    at_once = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20), "MIMALLOC_PURGE_DELAY": "0"}
    told = subprocess.run(
        command, capture_output=True, text=True, check=True, env=os.environ | at_once
    )
    assert int(told.stdout) < 1.1 * (128 << 20)


def growth():
    """Bytes by which this process grows as it reads them."""
    width = 4 * WIDTH + 8
    groups = FakeRowGroups([(16 << 20) // width] * 48)
    sizes = [resident_bytes()]
    groups.before = lambda number: sizes.append(resident_bytes())
    data = opened(
        groups,
        micro_batch_size=1 << 15,
        memory_bytes=128 << 20,
        shuffle="none",
        order=Order(
            group_rows=groups.rows, virtual_workers=V, micro_batch_size=1 << 15, shuffle="none"
        ),
    )
    data.read_ahead(1, range(V))
    for step, v in of_an_epoch(data):
        data.batch(step, v)
    data.close()
    assert len(groups.reads) >= 48
    return max(sizes) - sizes[0]


def test_too_little_memory_is_an_error_that_names_the_row_group():
    groups = FakeRowGroups([64] * 7 + [100] + [64] * 7)
    order = order_of(groups.rows)
    with pytest.raises(DataError, match=r"row group 3 of part-1 takes .* raise that to at least"):
        check_memory(groups, order, int(groups.nbytes[7]) - 1)
    with pytest.raises(DataError, match=r"runs all 4 virtual workers has up to 15 row groups open"):
        check_memory(groups, order, int(groups.nbytes.sum()) - 1)
    check_memory(groups, order, int(groups.nbytes.sum()))


def num_made(data):
    return len(data._pipeline.outbox._ready)


@pytest.mark.parametrize(("transform", "together"), [(None, 128), (lambda batch, rng: batch, 1)])
def test_micro_batches_are_made_ahead_and_not_without_end(transform, together):
    """In chunks of a bounded number of bytes; one by one where that takes the user's code."""
    groups = FakeRowGroups([64] * 200)
    row_bytes = 8 + 4 * WIDTH
    budget = 8 * 4 * 128 * B * row_bytes  # an eighth is for what is made ahead: four chunks
    data = opened(groups, epochs=None, memory_bytes=budget, transform=transform)
    data.read_ahead(1, [0])
    data.batch(1, 0)
    planner = data._pipeline._planner
    left = 4 * together - (together > 1)  # but for the one that was taken
    eventually(lambda: num_made(data) >= left)
    assert (planner.waiting, num_made(data)) == (4, left)
    assert planner.waiting_bytes == 4 * together * B * row_bytes


def draw_globally(batch):
    return batch | {
        "noise": np.array([random.random(), np.random.random(), float(torch.rand(()))]),
        "lam": torch.randn(3).to(torch.bfloat16),
    }


def pad(batch):
    return [torch.from_numpy(batch["id"]), (batch["noise"], str(batch["lam"])), torch.randperm(5)]


def test_processes_give_the_same_bits_as_the_callers_thread():
    shape = {"transform": draw_globally, "collate_fn": pad, "tail": "short"}
    here, there = opened(**shape), opened(**shape, workers=2)
    there.read_ahead(1, [0, 2])
    for step in (1, 2, 3, 5, 4, 40):
        for v in (0, 2, 3):
            if not here.rows(step, v):
                continue
            seed_everything(batch_seed(3, step, v))
            one, other = here.batch(step, v), there.batch(step, v)
            assert repr(one) == repr(other)
    pids = [process.pid for process in there._processes]
    assert len(pids) == 2
    here.close()
    there.close()
    assert not [thread for thread in there._pipeline._threads if thread.is_alive()]
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_transform_with_rng_runs_ahead_and_is_a_function_of_the_place():
    threads = set()

    def jitter(batch, rng):
        threads.add(threading.current_thread().name)
        return {"id": batch["id"], "noise": rng.normal(size=len(batch["id"]))}

    data = opened(transform=jitter)
    data.read_ahead(1, [1])
    eventually(lambda: num_made(data) > 0)
    assert any(name.startswith("elastic-dp-make") for name in threads)
    for step, v in ((1, 1), (2, 1), (2, 1), (1, 0)):
        noise = generator_for(3, step, v).normal(size=B)
        assert torch.equal(data.batch(step, v)["noise"], torch.from_numpy(noise))


def test_transform_takes_a_batch_or_is_refused():
    for transform in (lambda batch: batch, lambda batch, scale=2: batch, dict):
        opened(transform=transform)
    with pytest.raises(SpecError, match=r"DataConfig.transform takes \(a, b, c\)"):
        opened(transform=lambda a, b, c: a)


@pytest.mark.parametrize(
    "made",
    [lambda ids: [np.full(3, i) for i in ids], lambda ids: np.stack([ids] * 3, 1)[:, ::-1]],
)
def test_arrays_of_a_transform_are_a_tensor(made):
    data = opened(transform=lambda batch: batch | {"x": made(batch["id"])})
    batch = data.batch(1, 0)
    assert torch.equal(batch["x"], batch["id"][:, None].expand(-1, 3))


@pytest.mark.parametrize("dtype", [">i8", "U", "M8[s]", np.longdouble])
def test_an_array_of_a_transform_that_has_no_tensor_is_named(dtype):
    data = opened(transform=lambda batch: {"id": batch["id"].astype(dtype)})
    with pytest.raises(DataError, match=r"transform returned column 'id' as an array of .*no ten"):
        data.batch(1, 0)


def test_functions_that_cannot_be_sent_to_processes_are_refused():
    lock = threading.Lock()
    data = opened(transform=lambda batch: lock and batch, workers=1)
    with pytest.raises(SpecError, match=r"^DataConfig, .*cannot be sent to workers: TypeError"):
        data.batch(1, 0)


def fails(batch, rng=None):
    if 5 in batch["id"]:
        raise KeyError("no such pixel")
    return batch


def fails_early(batch, rng):
    return fails(batch)


@pytest.mark.parametrize(("transform", "workers"), [(fails, 0), (fails_early, 0), (fails_early, 1)])
def test_user_code_that_raises_is_said_with_its_place_and_only_there(transform, workers):
    data = opened(transform=transform, workers=workers, shuffle="none")
    data.read_ahead(1, [0, 1])
    check(data.batch(1, 1), list(range(8, 16)))
    with pytest.raises(UserCodeError) as caught:
        data.batch(1, 0)
    said = str(caught.value)
    for words in (
        "DataConfig.transform raised KeyError: 'no such pixel'",
        "step 1, virtual worker 0",
        "rows 0, 1, 2, 3, 4, 5, 6, 7 of part-0",
        "in fails",
    ):
        assert words in said
    check(data.batch(2, 0), list(range(32, 40)))


def dies(batch):
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_process_that_is_killed_is_named():
    data = opened(transform=dies, workers=1)
    data.read_ahead(1, [0])
    with pytest.raises(
        ClusterError, match=r"data process 1 of 1 \(pid \d+\) was killed by SIGKILL"
    ):
        data.batch(1, 0)


def leaves(*_):
    sys.exit(3)


@pytest.mark.parametrize(
    "make",
    [
        lambda: opened(transform=lambda batch, rng: leaves()),
        lambda: opened(FakeRowGroups(SIZES, before=leaves)),
    ],
)
def test_code_that_would_end_a_thread_is_an_error(make):
    with pytest.raises(UserCodeError, match=r"(?s)raised SystemExit: 3 on rows .*in leaves"):
        make().batch(1, 0)


def test_a_micro_batch_that_cannot_be_sent_by_its_process_is_refused():
    data = opened(collate_fn=lambda batch: (row for row in batch["id"]), workers=1)
    with pytest.raises(DataError, match="cannot be sent from a data process: TypeError: cannot"):
        data.batch(1, 0)


def test_batches_of_sparse_tensors_come_from_processes():
    data = opened(collate_fn=lambda batch: torch.eye(len(batch["id"])).to_sparse(), workers=1)
    assert torch.equal(data.batch(1, 0).to_dense(), torch.eye(B))


def test_a_bad_row_group_fails_exactly_the_micro_batches_that_need_it():
    groups = FakeRowGroups([16] * 8, bad=[2])
    data = opened(groups, shuffle="none")
    data.read_ahead(1, range(V))
    check(data.batch(1, 0), list(range(8)))
    with pytest.raises(BadShard, match=r"row group 2 of part-0 cannot be decoded: flipped bits"):
        data.batch(2, 0)
    check(data.batch(2, 2), list(range(48, 56)))


@pytest.mark.parametrize("shuffle", ["none", "rows", "full"])
def test_skipping_leaves_out_the_same_rows_for_any_workers(shuffle):
    groups = FakeRowGroups([16] * 8, bad=[2, 5])
    order = order_of(groups.rows, shuffle=shuffle)
    data = opened(groups, shuffle=shuffle, max_bad_fraction=0.01)
    data.read_ahead(1, [0, 1])
    gone = {*range(32, 48), *range(80, 96)}
    for step, v in of_an_epoch(data):
        ids = expected(order, groups, step, v)
        left = [i for i in ids if i not in gone]
        batch = data.batch(step, v)
        assert (batch is None) == (not left)
        if batch is not None:
            check(batch, left)
        assert data.rows(step, v) - data.masked(step, v) == len(left)
    assert frozenset().union(*(data.bad_row_groups(*at) for at in of_an_epoch(data))) == {2, 5}
    assert data.describe_row_group(5) == "row group 1 of part-1"


def test_row_group_recorded_as_bad_is_left_out_where_it_could_be_read():
    groups = FakeRowGroups([16] * 8)
    data = opened(groups, shuffle="none", max_bad_fraction=0.01)
    data.read_ahead(1, range(V))
    check(data.batch(1, 0), list(range(8)))
    eventually(lambda: num_made(data) > 3)
    data.mark_bad([0, 2])
    assert data.batch(1, 1) is None
    assert data.batch(2, 0) is None
    check(data.batch(1, 2), list(range(16, 24)))
    assert (data.masked(2, 0), data.masked(2, 2)) == (8, 0)


def test_bad_row_group_found_ahead_is_told_with_the_micro_batch_that_needs_it():
    data = opened(FakeRowGroups([16] * 8, bad=[2]), shuffle="none", max_bad_fraction=0.01)
    data.read_ahead(1, range(V))
    data.batch(1, 0)
    eventually(lambda: 2 in data._pipeline.bad)
    assert data.bad_row_groups(1, 0) == set()
    assert data.batch(2, 0) is None
    assert data.bad_row_groups(2, 0) == {2}


def test_more_bad_rows_than_the_limit_are_refused():
    groups = FakeRowGroups([10, 30, 60])
    data = opened(groups, shuffle="none", max_bad_fraction=0.1)
    data.check_bad([])
    data.check_bad([0])
    said = (
        r"max_bad_fraction is 0\.1, but 40 of the 100 rows of the data set, 0\.4 of them.*: row "
        r"group 0 of part-0, row group"
    )
    with pytest.raises(DataError, match=said):
        data.check_bad({0, 1})
    data = opened(groups, shuffle="none", max_bad_fraction=1)
    data.check_bad([0, 2])
    with pytest.raises(DataError, match="no row of the data set can be decoded: row group 0 of"):
        data.check_bad([0, 1, 2])


def test_evaluation_is_every_row_once_in_file_order_and_reads_each_row_group_once():
    groups = FakeRowGroups(SIZES)
    config, order = DataConfig("fake://", micro_batch_size=B), rows_in_file_order(groups.rows, B)
    data = Evaluation(stream_of(config, groups, order, evaluation=True))
    data.read_ahead(range(5, data.num_batches))
    late = [data.batch(i)["id"].tolist() for i in range(5, data.num_batches)]
    early = [data.batch(i)["id"].tolist() for i in range(5)]
    assert [i for batch in early + late for i in batch] == list(range(sum(SIZES)))
    assert len(groups.reads) == len(SIZES)
