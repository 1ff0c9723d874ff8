"""One digest for any group of workers: fixed sizes, a zoo of models through changing sizes, and
random histories."""

import random
import time
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from elastic_dp.config import DataConfig, MapStyleData
from elastic_dp.coordinator.messages import DrainNoticed, SizeRequested, StopRequested
from elastic_dp.data.discovery.index import read_index
from tests.patience import eventually
from tests.runs import ENDLESS, Points, goes_on, group, local, resize, spec_of
from tests.train.jobs import (
    autocast_bf16,
    average_and_plateau,
    batch_norm,
    compiled,
    plain,
    seventeen,
)

SLOW = pytest.mark.slow


def as_a_user_would(batch):
    """Nothing to see; but what it gives back begins anywhere."""
    x = np.empty(batch["x"].nbytes + 4, np.uint8)[4:].view(np.float32).reshape(batch["x"].shape)
    x[...] = batch["x"]
    return batch | {"x": x}


def tensors_of_arrays(batch):
    return {name: torch.from_numpy(array) for name, array in batch.items()}


def evaluation():
    return MapStyleData(Points(30), micro_batch_size=8)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it compiles
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=SLOW)])
def test_a_compiled_model(backend):
    """1 → 2 → 1 workers: the joiner takes its state into the compiled model."""
    sizes = {
        2: 2,
        8: 1,
    }  # a planned end may lie as many steps ahead as were made since the last heartbeat
    spec = spec_of(steps=24, workers=1, config={"hold": sizes, "backend": backend})
    calm = local(spec, compiled)  # and compiles, for all
    outcome, _ = group(spec, compiled, script=[resize(step, size) for step, size in sizes.items()])
    assert outcome.error is None, outcome.traceback
    assert outcome.generations >= 3
    assert outcome.digest == calm.digest


@pytest.mark.parametrize(
    ("shuffle", "more"),
    [
        pytest.param("none", {}, marks=SLOW),
        ("rows", {}),
        ("rows", {"transform": as_a_user_would}),
        pytest.param("rows", {"transform": as_a_user_would, "workers": 1}, marks=SLOW),
        pytest.param("rows", {"collate_fn": tensors_of_arrays}, marks=SLOW),
    ],
    ids=["none", "rows", "transform", "process", "collate_fn"],
)
def test_rows_of_an_odd_number_of_bytes(shuffle, more, tmp_path):
    """Where a micro-batch lies in its chunk depends on the number of workers, and a matrix product
    on the address of its input."""
    random = np.random.default_rng(0)
    for shard in range(4):
        x = pa.FixedSizeListArray.from_arrays(random.random(17 * 150, dtype=np.float32), 17)
        labels = random.integers(0, 4, 150)
        pq.write_table(
            pa.table({"x": x, "y": labels}), tmp_path / f"{shard}.parquet", row_group_size=50
        )
    data = DataConfig(str(tmp_path), micro_batch_size=3, shuffle=shuffle, **more)
    index = read_index(data)
    digests = {}
    for workers in (0, 1, 3):
        spec = replace(spec_of(steps=12, workers=max(1, workers)), data=data)
        if workers:
            spec = replace(spec, scaling=replace(spec.scaling, min_workers=workers))
            digests[workers] = group(spec, seventeen, index=index)[0].digest
        else:
            digests[workers] = local(spec, seventeen).digest
    assert len(set(digests.values())) == 1, digests


def test_digest_differs_between_steps():
    """The equalities above could not fail if all runs gave the same weights anyway."""
    assert local(spec_of(steps=3), plain).digest != local(spec_of(steps=2), plain).digest


def holders(run, now):
    """Who is known to hold the state: who came into the group with it, and everyone after the
    group's first step."""
    membership = run.controller.coordinator.membership
    began = max(member.position.step for member in membership.members)
    all_do = now["generation"] == membership.generation and now["step"] > began
    return {member.worker for member in membership.members if member.has_state or all_do}


@pytest.mark.parametrize("seed", [1, *(pytest.param(n, marks=SLOW) for n in range(20) if n != 1)])
def test_random_history_has_the_local_digest(seed):
    """Kills, joins, drains and scalings, some steps after the group has formed again, or none.

    Someone who holds the state always stays: what is lost with all of them is a matter for
    checkpoints.
    """
    rng = random.Random(seed)
    train = (plain, average_and_plateau, batch_norm, autocast_bf16)[seed % 4]
    config = {"eval": evaluation(), "body_s": 0.02}
    spec = spec_of(steps=ENDLESS, workers=3, standby=rng.randrange(2), config=config)
    done, killed, drained = [], set(), set()

    def disturb(run):
        def trains():
            now = status()
            members = sorted(w for w, stage in now["workers"].items() if stage == "member")
            settled = min(2, now["size"]) <= len(members) <= now["size"]
            settled = settled and now["phase"] == "running" and not killed.intersection(members)
            return settled and now["step"] >= at and members

        status = run.controller.status
        at = status()["step"] + rng.randrange(8)
        members = eventually(lambda: run.controller.ended.is_set() or trains(), status)
        if run.controller.ended.is_set():
            return  # which is a failure
        what = rng.choice(["kill", "kill", "drain", "scale"])
        staying = holders(run, status()).intersection(members) - drained
        victims = [member for member in members if staying - {member}]
        if what == "scale" or not victims:
            what = "scale"
            run.controller.post(SizeRequested(rng.randint(1, 5)))
        elif what == "drain":
            deadline = rng.choice([None, time.monotonic() + 1.0])
            drained.add(victim := rng.choice(victims))
            run.controller.post(DrainNoticed(victim, deadline))
        else:
            killed.add(victim := rng.choice(victims))
            run.worker_group.kill(victim)
        done.append(what)

    script = [*[(1, disturb)] * 5, (1, goes_on), (1, StopRequested("enough"))]
    outcome, _run = group(spec, train, script=script)
    assert outcome.error is None, (outcome.error, outcome.traceback, seed, done)
    calm = local(spec_of(steps=outcome.step, config=config), train)
    assert outcome.digest == calm.digest, (seed, done)
