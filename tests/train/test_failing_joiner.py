"""A worker whose own code fails before it joins harms no run in which others train."""

import os
from pathlib import Path

from elastic_dp.testing.process_worker_group import ProcessRun
from tests.patience import eventually
from tests.runs import local, spec_of
from tests.train.jobs import adamw, classifier, cross_entropy, hold


def train(ctx):
    """The loss raises in each process that begins while its file is missing."""
    model = classifier()
    mounted = os.path.exists(ctx.config["mount"])

    def loss_fn(model, batch):
        if not mounted:
            raise OSError("the mount of this node is missing")
        return cross_entropy(model, batch)

    for step in ctx.steps(model, adamw(model), loss_fn):
        ctx.log({"loss": step.loss})
        hold(ctx, step)


def test_joiner_that_fails_in_its_warm_up_is_replaced_and_its_traceback_said(tmp_path):
    mount = Path(tmp_path / "mount")
    mount.touch()
    config = {"mount": str(mount), "body_s": 0.05}
    spec = spec_of(virtual=4, workers=2, min_workers=1, steps=400, config=config)
    calm = local(spec, train).digest
    with ProcessRun(spec, train) as run:
        status = run.controller.status
        eventually(lambda: status()["world_size"] == 2 and status()["step"] > 3, status)
        mount.unlink()
        run.worker_group.processes["w2"].kill()

        def told():
            _, lines = run.journal.since(None, 0.0)
            return [
                line["text"] for line in lines if "fails before it joins" in line.get("text", "")
            ]

        eventually(told, status)
        mount.touch()
        eventually(lambda: status()["world_size"] == 2, status)
        outcome = run.wait()
    assert "OSError: the mount of this node is missing" in told()[0]
    assert "in loss_fn" in told()[0], "the traceback"
    assert (outcome.error, outcome.digest) == (None, calm)
