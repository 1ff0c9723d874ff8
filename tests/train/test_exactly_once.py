"""Every row exactly once an epoch, in the same micro-batches, whatever happens to the workers (I1,
I10).

Ragged shards of unique ids, on an S3 server and on the disk; three epochs with thirty kills, joins,
drains and scalings (eighteen in CI), and one stop of everything in the middle of an epoch, from
which another controller goes on. Each forward pass writes down which ids it was given, for which
step and virtual worker, before it goes on.
"""

import dataclasses
import itertools
import json
import multiprocessing
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from elastic_dp.config import CheckpointConfig, DataConfig, ScalingConfig
from elastic_dp.coordinator.messages import DrainNoticed, SizeRequested
from elastic_dp.data import open_data
from elastic_dp.data.discovery.index import read_index
from elastic_dp.train.fault_injection import WorkerFault
from tests.patience import eventually
from tests.runs import group, local, never_put_off, spec_of
from tests.storage.conftest import send
from tests.storage.servers import s3_options
from tests.train.jobs import loop

SHARDS, EPOCHS, V, B = 200, 3, 8, 2
CHECKPOINT_EVERY = 10
WHOLE_S = 400.0  # for a half, which is dozens of starts of workers
forkserver = multiprocessing.get_context("forkserver")


def shards(put):
    """Write shards of 1 to 6 rows in row groups of up to 4; each worker asks for each of them once.
    Returns the number of rows."""
    rng, first = random.Random(0), 0
    for number in range(SHARDS):
        rows = rng.randint(1, 6)
        table = pa.table({"id": np.arange(first, first + rows)})
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink, row_group_size=rng.randint(2, 4))
        put(f"part-{number:03}.parquet", sink.getvalue().to_pybytes())
        first += rows
    return first


def train(ctx):
    """Writes a line for each forward pass, and one for each step committed here."""
    model = torch.nn.Linear(1, 1)
    data, dealt = ctx._session.data, [(0, 0)]
    batch_of = data.batch

    def batch(step, virtual_worker):
        dealt[0] = step, virtual_worker
        return batch_of(step, virtual_worker)

    data.batch = batch
    with open(f"{ctx.config['folder']}/{ctx._session.worker}", "w", buffering=1) as log:

        def loss_fn(m, batch):
            log.write(f"{dealt[0][0]} {json.dumps([dealt[0][1], *batch['id'].tolist()])}\n")
            return m(batch["id"].float()[:, None] / 1000).square().mean()

        for step in ctx.steps(model, torch.optim.SGD(model.parameters(), lr=1e-3), loss_fn):
            log.write(f"{step.number} committed\n")
            time.sleep(ctx.config["body_s"])
            hold(ctx, step.number)


def hold(ctx, step):
    """Where something is to happen next: until it may, or the group changes."""
    if step in ctx.config["stops"]:
        control, go = ctx._session.control, Path(ctx.config["folder"], f"go-{step}")
        changes = [control._over, lambda: control._planned, lambda: control.release_reason]
        eventually(lambda: go.exists() or any(change() for change in changes))


def job(data, folder, body_s, stops=(), max_steps=None):
    folder.mkdir()
    config = {"folder": str(folder), "body_s": body_s, "stops": tuple(stops)}
    return dataclasses.replace(
        spec_of(config=config),
        data=data,
        scaling=ScalingConfig(max_workers=4, virtual_workers=V, threads_per_worker=1),
        checkpoint=CheckpointConfig(every_steps=CHECKPOINT_EVERY),
        max_steps=max_steps,
    )


Batches = dict[tuple[int, int], tuple[int, ...]]  # (step, virtual worker): ids


def given(folder):
    """The micro-batches of all forward passes; by worker, the steps it committed.

    A pass that was done again, here or elsewhere, was given the same rows.
    """
    batches = {}
    committed = {}
    for file in folder.iterdir():
        for line in file.read_text().splitlines(keepends=True):
            if not line.endswith("\n"):
                continue  # its writer was killed, or is about to write the rest
            step, what = line.split(" ", 1)
            if what == "committed\n":
                committed.setdefault(file.name, []).append(int(step))
            else:
                v, *ids = json.loads(what)
                assert batches.setdefault((int(step), v), tuple(ids)) == tuple(ids)
    for steps in committed.values():  # each from where it came in, none left out
        assert steps == list(range(steps[0], steps[-1] + 1))
    return batches, committed


# Of S3 the default run has kills below and faults in test_store_faults.py.
@pytest.mark.parametrize(
    ("where", "changes"),
    [
        ("disk", 18),
        pytest.param("disk", 30, marks=pytest.mark.slow),
        pytest.param("s3", 30, marks=pytest.mark.slow),
    ],
)
def test_rows_are_trained_on_exactly_once_by_any_number_of_workers(
    where, changes, tmp_path, request
):
    if where == "s3":
        endpoint = request.getfixturevalue("moto")
        send("PUT", f"{endpoint}/exactly-once")
        rows = shards(lambda name, x: send("PUT", f"{endpoint}/exactly-once/data/{name}", x))
        url, options = "s3://exactly-once/data", s3_options(endpoint)
    else:
        (tmp_path / "data").mkdir()
        rows = shards(lambda name, content: (tmp_path / "data" / name).write_bytes(content))
        url, options = str(tmp_path / "data"), None
    data = DataConfig(url, micro_batch_size=B, epochs=EPOCHS, tail="short", storage_options=options)
    calm = local(job(data, tmp_path / "calm", 0.0), train)
    batches, committed = given(tmp_path / "calm")
    steps = max(step for step, _ in batches)
    assert committed == {"w1": list(range(1, steps + 1))}
    assert Counter(itertools.chain(*batches.values())) == dict.fromkeys(range(rows), EPOCHS)

    rng, index = random.Random(where), read_index(data)
    disturb = sorted(rng.sample(range(2, steps - 5), changes))
    stop = steps // 2
    run = str(tmp_path / "run")
    early, late = ([s for s in disturb if (s < stop) == first] for first in (True, False))
    before = job(data, tmp_path / "before", 0.02, [*early, *range(stop, steps)])
    after = job(data, tmp_path / "after", 0.02, late)
    driver = forkserver.Process(target=drive, args=(before, index, run, early, stop, where))
    driver.start()
    driver.join(WHOLE_S)
    assert driver.exitcode == -signal.SIGKILL
    disturbances = Disturbances(rng, tmp_path / "after")
    script = [(step, disturbances.at(step)) for step in late]
    outcome, _ = group(after, train, script=script, timeout_s=WHOLE_S, index=index, url=run)
    assert disturbances.kills > 1 and outcome.generations > disturbances.kills
    assert outcome.digest == calm.digest

    given_before, committed_before = given(tmp_path / "before")
    given_after, committed_after = given(tmp_path / "after")
    commit = min(itertools.chain(*committed_after.values())) - 1
    assert commit % CHECKPOINT_EVERY == 0 and commit % (steps // EPOCHS)
    assert 0 < commit < max(itertools.chain(*committed_before.values())) < steps
    # Consumed are the steps up to the commit record before the stop, and those behind it after it.
    consumed = {place: ids for place, ids in given_before.items() if place[0] <= commit}
    consumed |= {place: ids for place, ids in given_after.items() if place[0] > commit}
    assert consumed == batches
    assert given_before.items() <= batches.items() >= given_after.items()
    assert set(itertools.chain(*committed_before.values())) >= set(range(1, commit + 1))
    assert set(itertools.chain(*committed_after.values())) == set(range(commit + 1, steps + 1))


def drive(spec, index, run, disturb, stop, seed):
    """The first half of the run, in a process of its own, which then dies with its controller and
    its workers."""
    folder = Path(spec.config["folder"])
    disturbances = Disturbances(random.Random(seed), folder)

    def die(run):
        """Between two checkpoints, so that some steps are made again. From `stop` on each step
        waits."""
        while (step := last()) % CHECKPOINT_EVERY != CHECKPOINT_EVERY // 2:
            go_on(folder, step)
            eventually(lambda s=step: last() > s, run.controller.status)
        os.kill(os.getpid(), signal.SIGKILL)

    def last():
        _, committed = given(folder)
        return max(itertools.chain(*committed.values()))

    script = [(step, disturbances.at(step)) for step in disturb] + [(stop, die)]
    train_on = never_put_off(train)
    group(spec, train_on, script=script, timeout_s=WHOLE_S, index=index, url=run)


def go_on(folder, step):
    (folder / f"go-{step}").touch()


def test_second_process_continues_in_the_middle_of_an_epoch(tmp_path):
    """The cursor is the step: whoever opens the data set later gets the same rows from any step
    on."""
    rows = shards(lambda name, content: (tmp_path / name).write_bytes(content))
    data = DataConfig(str(tmp_path), micro_batch_size=B, epochs=EPOCHS, tail="short")
    first, second = (open_data(data, virtual_workers=V) for _ in range(2))
    stop = first.steps_per_epoch * 3 // 2
    seen = Counter()
    for dataset, steps in ((first, range(1, stop)), (second, range(stop, 2 * rows))):
        dataset.read_ahead(steps.start, range(V))
        for step in steps:
            if dataset.epoch_of(step) == 2:
                break
            for v in range(V):
                if dataset.rows(step, v):
                    seen.update(dataset.batch(step, v)["id"].tolist())
        dataset.close()
    assert seen == dict.fromkeys(range(rows), 2)


class Disturbances:
    """Kills, drains and other sizes, each once two members have committed a step, so one that is
    left has the state; and after a kill not before the group has formed again."""

    def __init__(self, rng, folder):
        self._rng, self._folder = rng, folder
        self._kinds = itertools.cycle(rng.sample(["kill", "kill", "drain", "scale"], 4))
        self.kills, self._after = 0, 0

    def at(self, step):
        return lambda run: self._one(run, step)

    def _one(self, run, step):
        def settled():
            members = whole(run, self._folder)
            return len(members) > 1 and generation(run) > self._after and members

        members = eventually(
            lambda: run.controller.ended.is_set() or settled(), run.controller.status
        )
        if run.controller.ended.is_set():
            return
        go_on(self._folder, step)  # so that it happens anywhere in what follows
        what = next(self._kinds)
        if what == "scale":
            run.controller.post(SizeRequested(self._rng.randint(2, 4)))
        elif what == "drain":
            run.controller.post(DrainNoticed(self._rng.choice(members), None))
        else:
            victim = self._rng.choice(members)
            process = run.worker_group.processes.get(victim)
            if process is None:
                return  # it was drained, or released, and is gone meanwhile
            self.kills, self._after = self.kills + 1, generation(run)
            run.worker_group.kill(victim)
            process.join()


def generation(run):
    return run.controller.status()["generation"]


def whole(run, folder):
    workers = run.controller.status()["workers"]
    members = sorted(worker for worker, stage in workers.items() if stage == "member")
    return [
        member
        for member in members
        if member in run.worker_group.processes
        and (folder / member).exists()
        and "committed" in (folder / member).read_text()
    ]


CACHED, ROWS, STEPS = 6, 96, 12  # 24 rows in a step: three epochs of four steps


def trains_on_x(ctx):
    model = torch.nn.Linear(1, 1)

    def loss_fn(m, batch):
        return m(batch["x"].float()[:, None] / 100).square().mean()

    loop(ctx, model, torch.optim.SGD(model.parameters(), lr=1e-3), loss_fn)


def test_workers_that_are_killed_share_a_cache_and_its_limit(moto, tmp_path):
    send("PUT", f"{moto}/cached")
    for number in range(CACHED):
        sink = pa.BufferOutputStream()
        ids = np.arange(number * ROWS // CACHED, (number + 1) * ROWS // CACHED)
        pq.write_table(pa.table({"x": ids}), sink, row_group_size=4)
        send("PUT", f"{moto}/cached/data/{number}.parquet", sink.getvalue().to_pybytes())
    plain = DataConfig("s3://cached/data", micro_batch_size=3, storage_options=s3_options(moto))
    folder = tmp_path / "cache"
    data = dataclasses.replace(plain, cache_dir=str(folder), cache_bytes=1 << 20)
    scaling = {"workers": 3, "min_workers": 3}
    fault = WorkerFault("before_forward", step=3, rank=1, once=str(tmp_path / "dead"))
    outcome, _ = group(spec_of(steps=STEPS, data=data, **scaling), trains_on_x, faults=(fault,))
    assert outcome.workers_lost == 1
    assert outcome.digest == local(spec_of(steps=STEPS, data=plain, **scaling), trains_on_x).digest

    opened = open_data(data, virtual_workers=8)  # the next run on this machine
    try:
        for step in range(1, 5):
            for virtual_worker in range(8):
                opened.batch(step, virtual_worker)
        assert opened.counts["bytes_from_cache"] > 0
        assert opened.counts["bytes_read"] == 0
    finally:
        opened.close()
