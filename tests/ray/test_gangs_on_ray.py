"""Workers of several processes on a real Ray: one is killed, and the run goes on from where it was
and from its checkpoint, with the weights of one undisturbed worker."""

from __future__ import annotations

import dataclasses
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.distributed.fsdp import fully_shard

import elastic_dp as edp
from tests.patience import eventually
from tests.ray import clusters
from tests.ray.jobs import FOR_EVER, is_whole, members, pids_of, trainer, wait_for
from tests.train.jobs import adamw, classifier, cross_entropy, hold

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.fixture(scope="module", autouse=True)
def cluster():
    with clusters.nodes(2):
        yield


def train(ctx: Any) -> None:
    model = classifier()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=ctx.mesh)
    fully_shard(model, mesh=ctx.mesh)
    for step in ctx.steps(model, adamw(model), cross_entropy, clip_norm=1.0):
        ctx.log({"loss": step.loss})
        hold(ctx, step)


def gangs(path: Path, name: str, workers: int, **options: Any) -> edp.ElasticTrainer:
    made = trainer(path, name, train, workers=workers, **options)
    scaling = dataclasses.replace(made.spec.scaling, processes_per_worker=2)
    made.spec = dataclasses.replace(made.spec, scaling=scaling)
    return made


def followers_of(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(child) for child in (task / "children").read_text().split()]
    return [p for p in found if b"child_processes" in Path(f"/proc/{p}/cmdline").read_bytes()]


def test_loss_of_a_process_costs_its_worker_and_nothing_else(tmp_path):
    run = gangs(tmp_path, "kill", 2, steps=FOR_EVER, body_s=0.05).start()
    whole = wait_for(run, lambda s: is_whole(s, 2))
    before = pids_of(run, members(whole))
    victim, pid = sorted(before.items())[-1]
    (follower,) = followers_of(pid)
    others = [p for one in before.values() for p in followers_of(one)]
    os.kill(follower, signal.SIGKILL)
    again = wait_for(run, lambda s: is_whole(s, 2) and victim not in s["workers"])
    wait_for(run, lambda s: s["step"] >= again["step"] + 3)
    run.stop("enough")
    result = run.result()
    assert (result.exact, result.workers_lost) == (True, 1)
    calm = gangs(tmp_path, "calm", 1, steps=result.step).fit()
    assert result.weights_sha256 == calm.weights_sha256
    eventually(lambda: not [p for p in (pid, *others) if os.path.exists(f"/proc/{p}")])
    loaded = result.load_state()
    assert {name: tuple(t.shape) for name, t in loaded.model.items()} == {
        name: tuple(p.shape) for name, p in classifier().state_dict().items()
    }
