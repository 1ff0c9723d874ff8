"""Workers of several processes on a real Ray: processes die and freeze, and the run goes on from
where it was, and later from its checkpoint, with the weights of one undisturbed worker. No process
is left."""

from __future__ import annotations

import dataclasses
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import elastic_dp as edp
from tests.imported_when_used import ImportedWhenUsed
from tests.patience import eventually
from tests.processes import lives
from tests.ray import clusters
from tests.ray.jobs import FOR_EVER, is_whole, members, pids_of, trainer, wait_for
from tests.train.jobs import adamw, classifier, cross_entropy, hold

fsdp = ImportedWhenUsed("torch.distributed.fsdp")
pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.fixture(scope="module", autouse=True)
def cluster():
    with clusters.nodes(2, minimal=False):
        yield


def train(ctx: Any) -> None:
    if "pids" in ctx.config:
        Path(ctx.config["pids"], str(os.getpid())).touch()
    model = classifier()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fsdp.fully_shard(layer, mesh=ctx.mesh)
    fsdp.fully_shard(model, mesh=ctx.mesh)
    for step in ctx.steps(model, adamw(model), cross_entropy, clip_norm=1.0):
        ctx.log({"loss": step.loss})
        hold(ctx, step)


def gangs(path: Path, name: str, workers: int, **options: Any) -> edp.ElasticTrainer:
    made = trainer(path, name, train, workers=workers, **options)
    scaling = dataclasses.replace(made.spec.scaling, processes_per_worker=2)
    made.spec = dataclasses.replace(made.spec, scaling=scaling)
    return made


def follower_of(pid: int) -> int:
    """Return the other process of a worker."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(child) for child in (task / "children").read_text().split()]
    [follower] = [p for p in found if b"followers" in Path(f"/proc/{p}/cmdline").read_bytes()]
    return follower


def the_second_dies(first: int, second: int) -> None:
    os.kill(second, signal.SIGKILL)


def the_first_dies(first: int, second: int) -> None:
    os.kill(first, signal.SIGKILL)


def both_die(first: int, second: int) -> None:
    os.kill(first, signal.SIGKILL)
    os.kill(second, signal.SIGKILL)


def the_second_freezes_and_the_first_dies(first: int, second: int) -> None:
    os.kill(second, signal.SIGSTOP)
    os.kill(first, signal.SIGKILL)


FAULTS = (the_second_dies, the_first_dies, both_die, the_second_freezes_and_the_first_dies)


def test_loss_of_a_process_costs_its_worker_and_nothing_else(tmp_path):
    run = gangs(tmp_path, "kill", 2, steps=FOR_EVER, body_s=0.3).start()
    processes = set()
    for fault in FAULTS:
        whole = wait_for(run, lambda s: is_whole(s, 2))
        firsts = pids_of(run, members(whole))
        pairs = {worker: (pid, follower_of(pid)) for worker, pid in firsts.items()}
        processes |= {pid for pair in pairs.values() for pid in pair}
        victim = max(pairs)
        fault(*pairs[victim])
        again = wait_for(
            run, lambda s, victim=victim: is_whole(s, 2) and victim not in s["workers"]
        )
        wait_for(run, lambda s, again=again: s["step"] >= again["step"] + 3)
        eventually(lambda pair=pairs[victim]: not any(map(lives, pair)))
    run.stop("enough")
    result = run.result()
    assert (result.exact, result.workers_lost) == (True, len(FAULTS))
    calm = gangs(tmp_path, "calm", 1, steps=result.step).fit()
    assert result.weights_sha256 == calm.weights_sha256
    eventually(lambda: not any(map(lives, processes)))
    shapes = {name: tuple(p.shape) for name, p in classifier().state_dict().items()}
    loaded = result.load_state()
    assert {name: tuple(t.shape) for name, t in loaded.model.items()} == shapes
    with pytest.warns(UserWarning, match="max_steps is"):
        longer = gangs(tmp_path, "kill", 1, steps=result.step + 5, body_s=0.3).fit()
    calm = gangs(tmp_path, "calm", 1, steps=result.step + 5).fit()
    assert longer.weights_sha256 == calm.weights_sha256
