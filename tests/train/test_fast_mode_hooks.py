"""Whole runs in fast mode with torch's communication hooks (`comm_hook=`): the weights of DDP with
the same hook, and what a loss, a join and a restart do to what a hook remembers."""

from __future__ import annotations

import dataclasses
import multiprocessing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    bf16_compress_hook,
    fp16_compress_hook,
)
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from elastic_dp.config import CheckpointConfig, CommHookConfig, JobSpec, PowerSGDConfig
from elastic_dp.data import open_data
from elastic_dp.errors import SpecError
from elastic_dp.sampling.seeds import rounding_seed
from elastic_dp.testing.simulated_device import SimulatedDevice
from elastic_dp.train.fault_injection import WorkerFault
from tests.runs import group, local, resize, spec_of
from tests.train.checkpointing.test_worker_checkpointer import kill_all, when_committed
from tests.train.jobs import (
    adamw,
    classifier,
    cross_entropy,
    hold,
    in_small_buckets,
    loop,
    plain,
)

START, STEPS, STEP = 2, 10, 6
POWER_SGD = PowerSGDConfig(matrix_approximation_rank=2, start_powerSGD_iter=START)
HOOKS: Mapping[str, CommHookConfig] = {"bf16": "bf16", "fp16": "fp16", "powersgd": POWER_SGD}
of_each_hook = pytest.mark.parametrize("name", HOOKS)
SLOW = pytest.mark.slow


def hooked(name: str | None, **options: Any) -> JobSpec:
    spec = spec_of(**{"steps": STEPS, "exact": False, "rows": 480, "virtual": 6} | options)
    return dataclasses.replace(spec, comm_hook=None if name is None else HOOKS[name])


def without_dropout() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 24), nn.Tanh(), nn.Linear(24, 4)
    )


def told(folder: Path) -> Callable[..., None]:
    """Each worker leaves the digest of its weights after each step, in a file of its own. Gradients
    travel in six buckets, of which PowerSGD compresses the fourth and the last."""

    @in_small_buckets
    def trains(ctx: Any) -> None:
        model, session = without_dropout(), ctx._session
        for step in ctx.steps(model, adamw(model), cross_entropy, clip_norm=0.5):
            with open(folder / f"weights-{session.worker}", "a", encoding="utf-8") as file:
                file.write(f"{step.number} {session.state.digest()}\n")
            hold(ctx, step)

    return trains


def digests(folder: Path, first: int = 1) -> dict[int, str]:
    """Returns the one digest of each step that all workers have which began at step `first` or
    later."""
    found: dict[int, set[str]] = {}
    files = [file.read_text(encoding="utf-8").split() for file in folder.glob("weights-*")]
    files = [words for words in files if int(words[0]) >= first]
    for words in files:
        for step, digest in zip(words[::2], words[1::2], strict=True):
            found.setdefault(int(step), set()).add(digest)
    assert len(files) >= 2 and all(len(one) == 1 for one in found.values()), found
    return {step: digest for step, (digest,) in sorted(found.items())}


# ------------------------------------------------------------------------------------- beside DDP


def ddp(rank: int, path: str, spec: JobSpec, name: str, out: Any) -> None:
    """Trains `without_dropout` on the rows that the workers of `spec` have."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    model = DistributedDataParallel(without_dropout())
    state: Any = None
    if name == "powersgd":
        options = dataclasses.asdict(POWER_SGD)
        state = PowerSGDState(None, **options)
        # Its first Q is drawn from the seed of the step.
        state.rng = np.random.RandomState(rounding_seed(spec.data.seed, START + 1) % 2**32)
    hooks = {"bf16": bf16_compress_hook, "fp16": fp16_compress_hook, "powersgd": powerSGD_hook}
    # DDP refuses that for bf16 with Gloo by its name, whose all-reduce takes it.
    model.register_comm_hook(state, lambda state, bucket: hooks[name](state, bucket))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    virtual = spec.scaling.num_virtual_workers // 2
    data = open_data(spec.data, virtual_workers=spec.micro_batches_by_step)
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        for v in range(virtual):
            batch = data.batch(step, rank * virtual + v)
            if v < virtual - 1:
                with model.no_sync():
                    (cross_entropy(model, batch) / virtual).backward()
            else:
                (cross_entropy(model, batch) / virtual).backward()
        optimizer.step()
    data.close()
    out.put((rank, [p.detach().numpy() for p in model.module.parameters()]))
    dist.destroy_process_group()


def trained_by_ddp(path: Path, spec: JobSpec, name: str) -> list[torch.Tensor]:
    spawn = multiprocessing.get_context("spawn")
    out = spawn.Queue()
    given = [(rank, str(path / "ddp"), spec, name, out) for rank in range(2)]
    processes = [spawn.Process(target=ddp, args=one) for one in given]
    for process in processes:
        process.start()
    found = dict(out.get(timeout=120) for _ in processes)
    for process in processes:
        process.join()
    return [torch.from_numpy(x) for x in found[0]]


def saves(path: Path) -> Callable[..., None]:
    def train(ctx: Any) -> None:
        model = without_dropout()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in ctx.steps(model, optimizer, cross_entropy):
            hold(ctx, step)
        torch.save([p.detach() for p in model.parameters()], path / f"ours-{ctx.rank}")

    return train


@pytest.mark.parametrize("name", ["bf16", pytest.param("fp16", marks=SLOW), "powersgd"])
@pytest.mark.parametrize("virtual", [2, 4])
def test_weights_are_those_of_ddp_with_the_same_hook_on_the_same_rows(name, virtual, tmp_path):
    """With gradient accumulation where a worker has two virtual workers. The hook changes the
    weights by more than the tolerance."""
    spec = hooked(name, workers=2, min_workers=2, virtual=virtual)
    outcome, _ = group(spec, saves(tmp_path))
    assert outcome.error is None, outcome.traceback
    ours = [torch.load(tmp_path / f"ours-{rank}") for rank in range(2)]
    theirs = trained_by_ddp(tmp_path, spec, name)
    group(hooked(None, workers=2, min_workers=2, virtual=virtual), saves(tmp_path))
    without = torch.load(tmp_path / "ours-0")
    assert all(map(torch.equal, ours[0], ours[1]))
    tolerance = 1e-6
    changed = [float((a - b).abs().max()) for a, b in zip(ours[0], without, strict=True)]
    assert max(changed) > 20 * tolerance
    for mine, other in zip(ours[0], theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=tolerance)


# ---------------------------------------------------------------------------------------- elastic


def run_with_a_kill(name: str, folder: Path, fault: WorkerFault, **options: Any) -> str:
    """Each worker that is lost is replaced, unless `options` allow fewer. Returns the digest."""
    spec = hooked(name, **{"workers": 3, "min_workers": 3} | options)
    outcome, _ = group(spec, told(folder), faults=(fault,))
    assert outcome.error is None, outcome.traceback
    assert outcome.workers_lost == 1
    return outcome.digest


@pytest.fixture(scope="module")
def lost_before(tmp_path_factory) -> Callable[[str, int], tuple[str, dict[int, str]]]:
    """The final digest, and that of each step, of a run that loses a worker of this rank in the
    body before `STEP`, so that no part of its step was made with it."""
    known: dict[tuple[str, int], tuple[str, dict[int, str]]] = {}

    def find(name: str, rank: int) -> tuple[str, dict[int, str]]:
        if (name, rank) not in known:
            folder = tmp_path_factory.mktemp("lost-before")
            dead = WorkerFault("body", step=STEP - 1, rank=rank, once=str(folder / "dead"))
            known[name, rank] = run_with_a_kill(name, folder, dead), digests(folder)
        return known[name, rank]

    return find


# Where the lost worker has not launched all that the others need for their commit, by the point and
# how often it was passed: "sent" and "gather" between buckets. With PowerSGD the later all-reduces
# of a bucket are launched behind "exchange"; at "gather" those of the fourth one have ended.
NOBODY_COMMITS = [
    *((name, point, nth) for name in HOOKS for point, nth in [("backward", 1), ("sent", 1)]),
    *((name, "sent", 3) for name in HOOKS),
    *(("powersgd", point, nth) for point, nth in [("exchange", 1), ("gather", 4)]),
]
QUICK = [("bf16", "sent", 3, 0), ("powersgd", "gather", 4, 2)]
# Some members may have committed the step, which the others take over.
MAY_BE_COMMITTED = ("gather", "before_commit", "after_commit", "optimizer", "after_step", "body")


@pytest.mark.parametrize(
    ("name", "point", "nth", "rank"),
    [
        *QUICK,
        *(
            pytest.param(*one, rank, marks=SLOW)
            for one in NOBODY_COMMITS
            for rank in range(3)
            if (*one, rank) not in QUICK
        ),
    ],
)
def test_step_that_a_kill_aborts_leaves_nothing_behind(
    name, point, nth, rank, lost_before, tmp_path
):
    """The weights are those of a run that lost the worker before the step, on all workers."""
    dead = WorkerFault(point, step=STEP, rank=rank, nth=nth, once=str(tmp_path / "dead"))
    digest = run_with_a_kill(name, tmp_path, dead)
    found = digests(tmp_path)
    assert list(found) == [*range(1, STEPS + 1)]
    assert (digest, found) == lost_before(name, rank)


@pytest.mark.parametrize(
    "name", ["powersgd", *(pytest.param(name, marks=SLOW) for name in ("bf16", "fp16"))]
)
def test_survivors_of_a_kill_go_on_with_equal_weights(name, tmp_path):
    dead = WorkerFault("exchange", step=STEP, rank=1, once=str(tmp_path / "dead"))
    config = {"hold": dict.fromkeys(range(1, STEP - 1), 3)}
    run_with_a_kill(name, tmp_path, dead, min_workers=2, config=config)
    assert list(digests(tmp_path)) == [*range(1, STEPS + 1)]


@SLOW
@of_each_hook
@pytest.mark.parametrize("point", MAY_BE_COMMITTED)
def test_worker_lost_where_others_may_have_committed_leaves_equal_weights(name, point, tmp_path):
    dead = WorkerFault(point, step=STEP, rank=1, once=str(tmp_path / "dead"))
    run_with_a_kill(name, tmp_path, dead)
    assert list(digests(tmp_path)) == [*range(1, STEPS + 1)]


@pytest.mark.parametrize(
    "name", ["powersgd", *(pytest.param(name, marks=SLOW) for name in ("bf16", "fp16"))]
)
def test_restored_run_begins_as_survivors_with_a_joiner_do(name, tmp_path):
    """What a hook remembers is in no checkpoint, and no worker that joins gets it: a run whose
    workers are all lost, and that goes on from the checkpoint of a step, has the weights of one
    that lost a single worker in the next step, and took in another one."""
    folder, url, gate = tmp_path / "joined", tmp_path / "run", tmp_path / "gate"
    folder.mkdir()
    dead = WorkerFault("exchange", step=STEP, rank=1, once=str(folder / "dead"))
    joined = run_with_a_kill(name, folder, dead, workers=2, min_workers=2)
    assert list(digests(folder)) == [*range(1, STEPS + 1)]
    spec = hooked(name, workers=2, min_workers=2, config={"gates": {STEP + 1: str(gate)}})
    spec = dataclasses.replace(spec, checkpoint=CheckpointConfig(every_steps=STEP - 1))
    script = [(1, when_committed(url, STEP - 1, kill_all)), (1, lambda run: gate.touch())]
    outcome, _ = group(spec, told(tmp_path), script=script, url=str(url))
    assert outcome.error is None, outcome.traceback
    assert outcome.workers_lost >= 2
    assert list(digests(tmp_path, first=STEP)) == [*range(STEP, STEPS + 1)]
    assert outcome.digest == joined


@of_each_hook
def test_run_on_a_simulated_device_through_changing_sizes_has_equal_weights(name, tmp_path):
    """1 → 3 → 2 workers."""
    sizes = {2: 3, 7: 2}
    spec = hooked(name, workers=1, steps=12, config={"hold": sizes, "body_s": 0.02})
    script = [resize(step, size) for step, size in sizes.items()]
    outcome, _ = group(spec, told(tmp_path), script=script, device=SimulatedDevice())
    assert outcome.error is None, outcome.traceback
    assert outcome.generations >= 2
    assert list(digests(tmp_path)) == [*range(1, 13)]


@of_each_hook
def test_run_in_one_process_compresses_nothing(name):
    assert local(hooked(name), plain).digest == local(hooked(None), plain).digest


# ---------------------------------------------------------------------------------------- refused


def test_gradient_beyond_fp16_fails_the_run_with_the_way_out():
    def train(ctx):
        model = classifier()
        loop(ctx, model, adamw(model), lambda m, batch: cross_entropy(m, batch) * 1e7)

    outcome, _ = group(hooked("fp16", workers=2, min_workers=2), train)
    assert outcome.error is not None
    words = 'is not finite although every loss is, and comm_hook="fp16" has no number above 65504'
    assert words in outcome.traceback


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"precision": "fp16"}, 'precision is "fp16", whose gradients may overflow'),
        ({"noise_scale_every": 2}, "noise_scale_every compares"),
    ],
)
def test_argument_of_the_loop_that_no_hook_bears_is_refused(options, words):
    def train(ctx):
        model = classifier()
        loop(ctx, model, adamw(model), **options)

    with pytest.raises(SpecError) as caught:
        local(hooked("bf16"), train)
    assert words in str(caught.value)
