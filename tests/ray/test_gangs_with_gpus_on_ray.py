"""Workers of several processes for whose GPUs a real Ray answers, which counts fake ones: each
process of each worker sees another one, and trains on it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.fsdp import fully_shard

from tests.device import fake_gpu
from tests.patience import eventually
from tests.ray import clusters
from tests.ray.jobs import is_whole, members, pids_of, trainer, wait_for
from tests.train.jobs import adamw, classifier, cross_entropy, hold

pytestmark = [pytest.mark.ray, pytest.mark.slow]
SITE = str(Path(fake_gpu.__file__).parent / "fake_gpu_site")


@pytest.fixture(scope="module", autouse=True)
def cluster():
    with clusters.nodes(2, minimal=False, gpus=4, site=SITE):
        yield


def train(ctx: Any) -> None:
    # The thread that Ray runs an actor in is not one of Python's.
    in_actor = ctx.mesh.get_local_rank() == 0
    with fake_gpu.modes() if in_actor else contextlib.nullcontext():
        model = fully_shard(classifier().to(ctx.device), mesh=ctx.mesh)
        place = f"{ctx.device}, {ctx.mesh.device_type}"
        Path(ctx.config["seen"], os.environ["CUDA_VISIBLE_DEVICES"]).write_text(place)
        for step in ctx.steps(model, adamw(model), cross_entropy, clip_norm=1.0):
            hold(ctx, step)


def test_each_process_trains_on_one_of_the_gpus_that_ray_has_given_its_worker(tmp_path):
    seen = tmp_path / "seen"
    seen.mkdir()

    def job(name: str, workers: int, steps: int) -> Any:
        made = trainer(
            tmp_path, name, train, workers=workers, steps=steps, seen=str(seen), body_s=0.1
        )
        scaling = dataclasses.replace(
            made.spec.scaling, processes_per_worker=2, resources_per_worker={"CPU": 1, "GPU": 2}
        )
        made.spec = dataclasses.replace(made.spec, scaling=scaling)
        return made

    run = job("kill", 2, 100_000).start()
    whole = wait_for(run, lambda s: is_whole(s, 2))
    gpus = {file.name: file.read_text() for file in seen.iterdir()}
    assert gpus == dict.fromkeys("0123", "cuda:0, cuda")
    victim = max(members(whole))
    os.kill(pids_of(run, [victim])[victim], signal.SIGKILL)
    wait_for(run, lambda s: is_whole(s, 2) and victim not in s["workers"])
    at = run.status()["step"]
    eventually(lambda: run.status()["step"] >= at + 3)
    run.stop("enough")
    result = run.result()
    assert (result.exact, result.workers_lost) == (True, 1), result.inexact_because
    assert result.weights_sha256 == job("calm", 1, result.step).fit().weights_sha256
