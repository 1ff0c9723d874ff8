"""A model whose training does not fit in the memory of one worker trains with a sharded optimizer,
loses a worker, and goes on.

The limit is RLIMIT_DATA: it counts the heap, private mappings that can be written to, and stacks of
threads. RLIMIT_AS would count libraries, too, and what allocators and threads reserve and do not
touch: gigabytes in a process with torch, and more with each generation, beside which the difference
that is shown here is small.
"""

import dataclasses
import re
import resource
from pathlib import Path

import pytest
import torch
from torch import nn

from elastic_dp.train.fault_injection import WorkerFault
from tests.runs import group, local, losses_of, spec_of
from tests.train.jobs import loop

pytestmark = pytest.mark.slow

WORKERS = 8
WIDTH, DEPTH = 2048, 12
STEPS = 6
# For each parameter. Without sharding a worker needs 24: 4 for the parameter, 8 for its gradient,
# sent and received, and 12 for its state (AMSGrad). With it, 12 + 32 / 8 = 16, and 4 more while the
# group changes; see docs/larger-models.md. Stacks of threads, activations and so on come on top.
LIMIT_BYTES = 25.5


def deep():
    inner = (layer for _ in range(DEPTH) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU()))
    return nn.Sequential(nn.Linear(16, WIDTH), nn.ReLU(), *inner, nn.Linear(WIDTH, 4))


def limit_memory():
    """Lets this process take LIMIT_BYTES for each parameter of the model beside what it has."""
    status = Path("/proc/self/status").read_text()
    used = int(re.search(r"VmData:\s+(\d+) kB", status).group(1)) << 10
    with torch.device("meta"):
        numel = sum(p.numel() for p in deep().parameters())
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (used + int(LIMIT_BYTES * numel), most))


def train(ctx):
    if ctx.config.get("is_limited"):
        limit_memory()
    model = deep()
    loop(ctx, model, torch.optim.AdamW(model.parameters(), lr=1e-4, amsgrad=True))


def job(**config):
    return spec_of(
        steps=STEPS, workers=WORKERS, min_workers=WORKERS, virtual=WORKERS, config=config
    )


@pytest.fixture(scope="module")
def digest():
    return local(job(), train).digest


# Before the sums are exchanged, between the two halves of the exchange, before the parameters are
# gathered, and behind all that. But for the last, operations of the others keep their buffers.
@pytest.mark.parametrize("point", ["sent", "exchange", "gather", "prepared", "gathered"])
def test_model_that_does_not_fit_trains_sharded_and_goes_on_after_a_loss(digest, tmp_path, point):
    """The others have finished their work of the step, which is used in the next attempt, and hold
    what they have prepared."""
    spec = dataclasses.replace(job(is_limited=True), sharding="optimizer")
    fault = WorkerFault(point, 4, rank=2, world_size=WORKERS, once=str(tmp_path / "dead"))
    outcome, run = group(spec, train, faults=(fault,), timeout_s=500)
    assert (outcome.step, outcome.workers_lost) == (STEPS, 1), losses_of(run)
    assert outcome.digest == digest


def test_the_same_job_without_sharding_fails_for_lack_of_memory():
    outcome, _ = group(job(is_limited=True), train, timeout_s=500, fails=True)
    told = ("can't allocate memory", "can't start new thread")  # whose stack is memory, too
    assert any(text in outcome.error for text in told)
