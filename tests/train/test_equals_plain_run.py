"""A run of any strategy and optimizer, disturbed in any way, has the bits and the metrics of the
same run in one process that nothing disturbs."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from elastic_dp.config import CheckpointConfig, JobSpec
from elastic_dp.testing.simulated_device import SimulatedDevice
from elastic_dp.train.fault_injection import WorkerFault
from tests.runs import group, lines_of, local, never_put_off, resize, spec_of
from tests.train import test_growing_batch, test_kills, test_large_batch_optimizers, test_precision
from tests.train.checkpointing.test_worker_checkpointer import kill_all, when_committed
from tests.train.jobs import ZOO, batch_norm, in_small_buckets
from tests.train.test_finished_work import (
    LARGE_LOSS,
    SMALL_LOSS,
    STEP,
    VIRTUAL,
    counted,
    dies_last,
    passes,
)
from tests.train.test_finished_work import job as job_of_three
from tests.train.test_inner_moments import trains as moments
from tests.train.test_inner_moments import trains_delayed as delayed_moments
from tests.train.test_inner_steps import (
    HOW,
    INNER,
    measuring,
    outer,
    trains_batch_norm,
    trains_with_moments,
)
from tests.train.test_kills import IN_A_STEP, IN_BUCKETS, SECONDS, VICTIMS
from tests.train.test_master_weights import with_masters
from tests.train.test_nodes import on_nodes, topologies
from tests.train.test_noise_scale import logs
from tests.train.test_weight_prediction import predicting

# The train function, options of the job, and what ctx.config has.
STRATEGIES: dict[str, tuple[Callable[..., None], dict[str, Any], dict[str, Any]]] = {
    "replicated": (batch_norm, {}, {}),
    "bf16": (logs, {"wire": "bf16"}, {}),
    "int8": (logs, {"wire": "int8"}, {}),
    "delayed": (batch_norm, {"staleness": 1}, {}),
    "delayed int8": (batch_norm, {"staleness": 1, "wire": "int8"}, {}),
    "predicted": (predicting, {"staleness": 1}, {}),
    "predicted int8": (predicting, {"staleness": 1, "wire": "int8"}, {}),
    "inner": (measuring, {"inner_steps": INNER}, {}),
    "inner with Adam's moments": (trains_with_moments, {"inner_steps": INNER}, {}),
    "inner, delayed int8": (
        trains_batch_norm,
        {"inner_steps": INNER, "staleness": 1, "wire": "int8"},
        {},
    ),
    "factored moments int8": (
        moments,
        {"inner_steps": INNER, "wire": "int8"},
        {"second_moments": "factored"},
    ),
    "whole moments bf16": (
        moments,
        {"inner_steps": INNER, "wire": "bf16"},
        {"second_moments": "whole"},
    ),
    "delayed moments int8": (
        delayed_moments,
        {"inner_steps": INNER, "staleness": 1, "wire": "int8"},
        {"second_moments": "factored"},
    ),
    "masters": (with_masters, {}, {}),
    **{
        name: (test_large_batch_optimizers.training(make), {}, {})
        for name, make in test_large_batch_optimizers.OPTIMIZERS.items()
    },
    **{
        f"torchao, {name}": (test_precision.training(name), {}, {})
        for name in test_precision.OPTIMIZERS
    },
    "products in fp8": (test_precision.train_in_fp8, {}, {}),
}


@dataclass
class Disturbed:
    """A job, what happens to it, and how many workers are lost at least."""

    spec: JobSpec
    faults: tuple[WorkerFault, ...] = ()
    lost: int = 0
    cut: Callable[..., Any] = lambda train: train
    how: dict[str, Any] = field(default_factory=dict)  # arguments of `group`
    topology: Any = None  # of some generation


def of_size(workers: int, folder: Path) -> Disturbed:
    """11 virtual workers, of which some have fewer rows in the last step of an epoch."""
    options = {"workers": workers, "min_workers": workers, "virtual": 11}
    spec = spec_of(steps=7, rows=200, tail="short", **options)
    return Disturbed(spec, cut=in_small_buckets if workers == 3 else lambda train: train)


def resized(folder: Path) -> Disturbed:
    sizes = {2: 3, 6: 2}
    spec = spec_of(steps=9, workers=1, virtual=6, config={"hold": sizes, "body_s": 0.02})
    return Disturbed(spec, how={"script": [resize(*one) for one in sizes.items()]})


def killed(point: str, ranks: tuple[int, ...], folder: Path) -> Disturbed:
    """In the second micro-batch, where one has the point."""
    nth = 2 if point in ("before_forward", "forward", "backward") else 1
    faults = tuple(
        WorkerFault(point, step=STEP, rank=rank, nth=nth, once=str(folder / f"dead-{rank}"))
        for rank in ranks
    )
    # Not all of these jobs have buffers, and none evaluates. Of two, the second one may hear of the
    # loss of the first before it comes to the point.
    lost = 0 if point in ("buffers", "evaluate", "evaluate_exchange") else 1
    spec = job_of_three(min_workers=1)
    return Disturbed(spec, faults, lost, in_small_buckets if point in IN_BUCKETS else lambda t: t)


def killed_one_after_the_other(folder: Path) -> Disturbed:
    """The second one in the step in which lost micro-batches of the first one run again."""
    first, second = str(folder / "first"), str(folder / "second")
    faults = (
        WorkerFault("exchange", step=STEP, rank=0, once=first),
        WorkerFault("backward", rank=0, world_size=2, once=second, after=(first,)),
    )
    return Disturbed(job_of_three(min_workers=1), faults, lost=2)


def killed_on_a_device(point: str, folder: Path) -> Disturbed:
    made = killed(point, (2,), folder)
    return dataclasses.replace(made, how={"device": SimulatedDevice()})


def killed_while_it_grows(folder: Path) -> Disturbed:
    """On two nodes, in the first step of more virtual workers."""
    spec = test_growing_batch.job(config={"hold": dict.fromkeys(range(1, 5), 3)})
    dead = WorkerFault("backward", step=7, rank=2, once=str(folder / "dead"))
    return Disturbed(spec, (dead,), lost=1, how={"location": on_nodes(2)})


def zone_lost(folder: Path) -> Disturbed:
    """The two workers of one of two zones. The sums of a zone leave it as one before that."""
    spec = spec_of(steps=8, workers=4, virtual=4, config={"hold": {1: 4, 2: 4, 7: 4}})
    zone = tuple(
        WorkerFault("backward", step=6, rank=rank, once=str(folder / str(rank))) for rank in (2, 3)
    )
    how = {"location": on_nodes(4, zones=2)}
    return Disturbed(spec, zone, lost=2, how=how, topology=[[2, 2]])


def all_lost(folder: Path) -> Disturbed:
    """The run goes on from a checkpoint."""
    url, gate = folder / "run", folder / "gate"
    spec = spec_of(steps=10, workers=2, config={"gates": {6: str(gate)}, "body_s": 0.02})
    spec = dataclasses.replace(spec, checkpoint=CheckpointConfig(every_steps=4))
    script = [(1, when_committed(url, 4, kill_all)), (1, lambda run: gate.touch())]
    return Disturbed(spec, lost=2, cut=never_put_off, how={"script": script, "url": str(url)})


FAULTS: dict[str, Callable[[Path], Disturbed]] = {
    **{f"{n} workers": partial(of_size, n) for n in range(1, 9)},
    "1, 3, 2 workers": resized,
    **{
        f"{point} of {ranks}": partial(killed, point, ranks)
        for point, ranks in zip(IN_A_STEP, itertools.cycle(VICTIMS))
    },
    "one after the other": killed_one_after_the_other,
    **{
        f"{point} on a device": partial(killed_on_a_device, point)
        for point in ("backward", "exchange", "before_commit")
    },
    "while it grows": killed_while_it_grows,
    "a zone": zone_lost,
    "all": all_lost,
}
# What one of them shows that the others before it do not. The others are tried with `make slow`.
IN_CI = {
    *itertools.product(("bf16", "int8", "delayed", "inner"), ["3 workers"]),
    *itertools.product(
        ("delayed", "inner, delayed int8", "factored moments int8", "whole moments bf16"),
        ["1, 3, 2 workers"],
    ),
    *itertools.product(("predicted", "masters"), ["1, 3, 2 workers"]),
    ("predicted", "backward of (2,)"),
    ("inner", "backward on a device"),
}


def pairs(faults: Any) -> list[Any]:
    made = itertools.product(STRATEGIES, faults)
    return [pytest.param(*pair, marks=() if pair in IN_CI else pytest.mark.slow) for pair in made]


def job_of(strategy: str, spec: JobSpec) -> tuple[JobSpec, Callable[..., None]]:
    train, options, config = STRATEGIES[strategy]
    return dataclasses.replace(spec, **options, config={**spec.config, **config}), train


def logged(lines: Any) -> list[Any]:
    """Return what the loop logged. NaN equals NaN."""
    kept = [line for line in lines if "event" not in line and "command" not in line]
    return [repr({k: v for k, v in line.items() if k != "time"}) for line in kept]


def test_pairs_in_ci_exist() -> None:
    assert set(itertools.product(STRATEGIES, FAULTS)) >= IN_CI


@pytest.mark.parametrize(("strategy", "fault"), pairs(FAULTS))
def test_disturbed_run_equals_the_plain_one(strategy: str, fault: str, tmp_path: Path) -> None:
    made = FAULTS[fault](tmp_path)
    spec, train = job_of(strategy, made.spec)
    outcome, run = group(spec, made.cut(train), faults=made.faults, **made.how)
    assert outcome.error is None, outcome.traceback
    assert outcome.workers_lost >= made.lost
    calm = local(spec, train)
    assert (outcome.step, outcome.digest) == (calm.step, calm.digest)
    assert logged(lines_of(run)) == logged(calm.logged)
    assert made.topology is None or made.topology in topologies(run)


@pytest.mark.slow
@pytest.mark.parametrize("seconds", SECONDS, ids=str)
@pytest.mark.parametrize("strategy", ["delayed", "inner"])
def test_run_killed_while_a_generation_forms_equals_the_plain_one(strategy, seconds, tmp_path):
    spec, train = job_of(strategy, test_kills.job(workers=4))
    faults = test_kills.while_it_forms(seconds, tmp_path)
    outcome, _ = test_kills.with_faults(spec, train, faults)
    assert outcome.error is None, outcome.traceback
    calm = dataclasses.replace(spec, max_steps=outcome.step)
    assert outcome.digest == local(calm, train).digest


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["bf16", "int8", "delayed"])
@pytest.mark.parametrize("name", ZOO)
# Its body steps the scheduler in the first step, too, in which the optimizer is not called.
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_zoo_model_through_changing_sizes_equals_the_plain_run(name, strategy, tmp_path):
    if strategy == "delayed" and name in (
        *("average_and_plateau", "lazy_optimizer_state"),  # refused: the loss reads the body
        "clipped_average_norm",  # wants a norm in the first step
    ):
        pytest.skip("no job for delayed gradients")
    made = resized(tmp_path)
    shape = (3, 8, 8) if name == "channels_last" else ()
    config = made.spec.config | {"eval": test_kills.job().config["eval"]}
    spec = spec_of(steps=9, workers=1, virtual=6, shape=shape, config=config)
    spec = dataclasses.replace(spec, **STRATEGIES[strategy][1])
    outcome, _ = group(spec, ZOO[name], **made.how)
    assert outcome.error is None, outcome.traceback
    assert outcome.digest == local(spec, ZOO[name]).digest


def without(strategy: str, option: str, otherwise: Any) -> bool:
    """Whether the option changes a bit."""
    spec, train = job_of(strategy, spec_of(steps=4, virtual=3))
    plain = dataclasses.replace(spec, **{option: otherwise})
    return local(spec, train).digest == local(plain, train).digest


@pytest.mark.parametrize("strategy", ["bf16", "int8", "delayed", "inner, delayed int8"])
def test_option_of_a_strategy_changes_the_bits(strategy):
    """The equalities above could not fail for its sake otherwise."""
    for option in STRATEGIES[strategy][1].keys() - {"inner_steps"}:
        assert not without(strategy, option, 0 if option == "staleness" else None)


def dies(rank: int, nth: int, point: str = "backward", step: int = STEP) -> dict[str, Any]:
    return {"rank": rank, "nth": nth, "point": point, "step": step}


SLOW = pytest.mark.slow
LOST = [  # options of the job, where one of three workers with 4 of 12 virtual workers each dies
    ({"min_workers": 3, "standby": 1}, {}, dies(2, 3, "before_forward"), 2),
    ({"min_workers": 3, "standby": 1}, {}, dies(2, 3), 3),
    ({}, {}, dies(0, 4), 4),
    ({}, {}, dies(2, 4), 4),
    ({}, {"wire": "bf16"}, dies(1, 4), 4),
    ({}, {"wire": "int8"}, dies(1, 4), 4),
    # Those of the step before run again, too.
    ({}, {"staleness": 1}, dies(1, 4), 8),
    # In the last inner step of its last one.
    ({}, {"inner_steps": INNER}, dies(1, 4 * INNER), 4),
    ({}, {"inner_steps": INNER, "wire": "int8", "staleness": 1}, dies(1, 4 * INNER), 8),
    pytest.param({}, {"inner_steps": INNER, "wire": "bf16"}, dies(1, 4 * INNER), 4, marks=SLOW),
]


@pytest.mark.parametrize(("scaling", "options", "dead", "again"), LOST, ids=str)
def test_of_a_lost_worker_only_its_virtual_workers_run_again(
    scaling, options, dead, again, tmp_path
):
    spec = dataclasses.replace(job_of_three(**{"min_workers": 2} | scaling), **options)
    inner = options.get("inner_steps", 1)
    train = counted(tmp_path, **({"optimizer": outer, **HOW} if inner > 1 else {}))
    fault = WorkerFault(**dead, once=str(tmp_path / "dead"))
    outcome, _ = group(spec, dies_last(train, tmp_path), faults=(fault,))
    assert outcome.error is None, outcome.traceback
    assert outcome.workers_lost == 1
    times = passes(tmp_path)
    assert sum(times.values()) == inner * (VIRTUAL + again)
    assert "staleness" in options or len(times) == inner * VIRTUAL
    (tmp_path / "passes").unlink()
    assert outcome.digest == local(spec, train).digest
    assert sum(passes(tmp_path).values()) == inner * VIRTUAL


@pytest.mark.parametrize("step", [LARGE_LOSS, SMALL_LOSS], ids=["overflows", "smaller scale"])
@pytest.mark.parametrize("wire", [None, *(pytest.param(w, marks=SLOW) for w in ("bf16", "int8"))])
def test_lost_worker_beside_a_change_of_the_loss_scale_only_its_leaves_run_again(
    step, wire, tmp_path
):
    """The gradient of step 5 overflows, so step 6 has half its loss scale."""
    dead = WorkerFault("backward", step=step, rank=1, nth=4, once=str(tmp_path / "dead"))
    spec = dataclasses.replace(job_of_three(min_workers=2), wire=wire)
    train = counted(tmp_path, precision="fp16", large_loss=LARGE_LOSS)
    outcome, _ = group(spec, dies_last(train, tmp_path), faults=(dead,))
    assert outcome.error is None, outcome.traceback
    assert sum(passes(tmp_path, step).values()) == VIRTUAL + 4
    assert outcome.digest == local(spec, train).digest
    scales = dict(line.split() for line in (tmp_path / "scales").read_text().splitlines())
    assert float(scales[str(SMALL_LOSS)]) == float(scales[str(LARGE_LOSS)]) / 2
