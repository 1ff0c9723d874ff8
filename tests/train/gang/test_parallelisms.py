"""Workers of several processes: torch's parallelism within a worker, our sums between them. The
weights are the same for any number of workers, whatever happens to them, in each way to divide a
model over the processes of a worker."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from typing import Any

import pytest
import safetensors.torch
from torch import nn

from elastic_dp.checkpoint.catalog import Catalog
from elastic_dp.checkpoint.exporting import export
from elastic_dp.config import CheckpointConfig, JobSpec, ScalingConfig
from elastic_dp.errors import SpecError
from elastic_dp.run_record import RunOutcome
from elastic_dp.storage import Store
from elastic_dp.testing.process_worker_group import ProcessRun
from elastic_dp.testing.simulated_device import SimulatedDevice
from elastic_dp.train.fault_injection import WorkerFault
from tests.imported_when_used import ImportedWhenUsed
from tests.runs import ENDLESS, group, lines_of, local, losses_of
from tests.train.gang.parallelisms import (
    CONTEXT_AND_TENSOR_PARALLEL,
    CONTEXT_PARALLEL,
    FULLY_SHARD,
    PARALLELISMS,
    STEPS,
    TENSOR_AND_DATA_PARALLEL,
    TENSOR_PARALLEL,
    Parallelism,
    scaled,
)
from tests.train.jobs import adamw
from tests.train.test_kills import IN_A_STEP, with_faults
from tests.train.test_simulated_device import faults_while_switched

fsdp = ImportedWhenUsed("torch.distributed.fsdp")

IN_A_STEP_OF_GANGS = [point for point in IN_A_STEP if point != "buffers"]
SLOW = pytest.mark.slow


def named(parallelism: Parallelism, *others: Any, slow: bool = False) -> Any:
    """Returns the parameters of one case."""
    name = "-".join([parallelism.name, *map(str, others)])
    return pytest.param(parallelism, *others, id=name, marks=SLOW if slow else ())


EACH = [named(one) for one in PARALLELISMS]
BOTH = named(CONTEXT_AND_TENSOR_PARALLEL, slow=True)


@functools.cache
def calm(parallelism: Parallelism, steps: int = STEPS) -> tuple[RunOutcome, ProcessRun]:
    """An undisturbed run of one gang, on the processor."""
    outcome, run = group(parallelism.spec(1, steps=steps), parallelism.train)
    assert (outcome.step, outcome.error) == (steps, None), losses_of(run)
    return outcome, run


@pytest.mark.parametrize("parallelism", [*EACH, BOTH])
def test_gang_trains_as_one_process_does_on_the_same_rows(parallelism: Parallelism) -> None:
    """Losses, norms, metrics and evaluations, dropout of whole activations included; with parts of
    the positions also those of parts with other weights, of rows to which random numbers are
    added."""
    assert_as_one_process(calm(parallelism)[1], parallelism)


def assert_as_one_process(run: ProcessRun, parallelism: Parallelism, train: Any = None) -> None:
    """What a run of gangs has logged is what one process logs that has the same rows."""
    logged = [x for x in lines_of(run) if "norm" in x or "eval_loss" in x]
    spec = scaled(parallelism.spec(1), processes_per_worker=1, **parallelism.alone)
    expected = local(spec, train or parallelism.train).logged
    assert len(logged) == len(expected)
    for one, other in zip(logged, expected, strict=True):
        assert one == pytest.approx({**one, **other}, rel=1e-4)


@pytest.mark.parametrize(
    ("parallelism", "process"),
    [
        named(FULLY_SHARD, 0, slow=True),
        named(FULLY_SHARD, 1),
        named(TENSOR_PARALLEL, 1),
        named(TENSOR_AND_DATA_PARALLEL, 3),
        named(CONTEXT_PARALLEL, 1),
    ],
)
def test_loss_of_a_process_costs_its_gang_and_no_step(
    parallelism: Parallelism, process: int, tmp_path: Any
) -> None:
    once = str(tmp_path / "once")
    fault = WorkerFault("backward", 3, rank=1, world_size=2, process=process, once=once)
    spec = parallelism.spec(2, config={"body_s": 0.05})
    outcome, run = group(spec, parallelism.train, faults=(fault,))
    assert outcome.workers_lost == 1, losses_of(run)
    assert (outcome.digest, outcome.inexact_because) == (calm(parallelism)[0].digest, ())


@pytest.mark.parametrize(
    "parallelism", [named(one, slow=one is not FULLY_SHARD) for one in PARALLELISMS]
)
def test_run_that_was_stopped_goes_on_with_another_number_of_gangs_and_the_same_rows(
    parallelism: Parallelism, tmp_path: Any
) -> None:
    """The last checkpoint is exported whole, and other rows for the processes are refused."""
    first = parallelism.spec(2, steps=4)
    first = dataclasses.replace(first, checkpoint=CheckpointConfig(every_steps=2))
    outcome, run = group(first, parallelism.train, url=str(tmp_path))
    assert outcome.step == 4, losses_of(run)
    outcome, run = group(parallelism.spec(1), parallelism.train, url=str(tmp_path))
    undisturbed = calm(parallelism)[0].digest
    assert (outcome.step, outcome.digest) == (STEPS, undisturbed), losses_of(run)
    assert digest_of_export(str(tmp_path), parallelism.whole()) == undisturbed

    def trains_on_other_rows(ctx: Any) -> None:
        model = parallelism.whole()
        if ctx._session.gang is not None:
            fsdp.fully_shard(model, mesh=ctx.mesh)
        for _ in ctx.steps(model, adamw(model), parallelism.loss_fn):
            pass

    other = scaled(parallelism.spec(1, steps=12), **parallelism.other_rows)
    outcome, _ = group(other, trains_on_other_rows, url=str(tmp_path))
    [(field, value)] = parallelism.other_rows.items()
    assert f"{field} is {value}, but the newest checkpoint" in str(outcome.error)


def digest_of_export(url: str, model: nn.Module) -> str:
    """Returns the digest of the weights in a file that is exported from the newest checkpoint of
    this model."""
    catalog, file = Catalog(Store(url)), f"{url}/exported.safetensors"
    export(catalog, catalog.read(catalog.names()[-1]), file)
    exported, digest = safetensors.torch.load_file(file), hashlib.sha256()
    for name, p in model.named_parameters():
        digest.update(f"{name} {tuple(p.shape)} {p.dtype}\n".encode())
        digest.update(exported[name].numpy().tobytes())
    return digest.hexdigest()


def test_sizes_that_do_not_divide_the_processes_and_gpus_are_refused_by_name() -> None:
    for processes in (1, 3):
        with pytest.raises(SpecError, match="tensor_parallel_size is 2 and processes_per_worker"):
            ScalingConfig(processes_per_worker=processes, tensor_parallel_size=2)
    for context in (1, 2):
        with pytest.raises(SpecError, match="tensor_parallel_size is 2, which does not work on G"):
            ScalingConfig(
                processes_per_worker=2 * context,
                tensor_parallel_size=2,
                context_parallel_size=context,
                resources_per_worker={"GPU": 2 * context},
            )
    for processes in (1, 3, 4):
        with pytest.raises(SpecError, match="context_parallel_size is 2 and processes_per_worker"):
            ScalingConfig(processes_per_worker=processes, context_parallel_size=2)
    with pytest.raises(SpecError, match=r"processes_per_worker 4 \(context_parallel_size times"):
        ScalingConfig(processes_per_worker=2, context_parallel_size=2, tensor_parallel_size=2)


# --------------------------------------------------------------------------------- the kill matrix


@SLOW
@pytest.mark.parametrize("parallelism", [*EACH, BOTH])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_any_number_of_gangs_has_the_digest_of_one(parallelism: Parallelism, workers: int) -> None:
    outcome, run = group(parallelism.spec(workers), parallelism.train)
    assert outcome.digest == calm(parallelism)[0].digest, losses_of(run)


@SLOW
@pytest.mark.parametrize("parallelism", EACH)
@pytest.mark.parametrize("point", IN_A_STEP_OF_GANGS)
def test_any_process_may_die_at_any_point_of_a_step(
    parallelism: Parallelism, point: str, tmp_path: Any
) -> None:
    check_kills_of_each_process(parallelism, point, tmp_path)


def check_kills_of_each_process(
    parallelism: Parallelism, point: str, tmp_path: Any, device: SimulatedDevice | None = None
) -> None:
    """One after another dies at `point`, with all gangs there."""
    victims = [(rank, process) for rank in range(2) for process in range(parallelism.processes)]
    files = [str(tmp_path / f"{rank}-{process}") for rank, process in victims]
    faults = tuple(
        WorkerFault(
            point,
            rank=rank,
            process=process,
            world_size=2,
            once=file,
            after=tuple(files[:number]),
            settled=True,
        )
        for number, ((rank, process), file) in enumerate(zip(victims, files, strict=True))
    )
    config = {"body_s": 0.05}
    spec = parallelism.spec(2, steps=ENDLESS, min_workers=1, standby=1, config=config)
    train = parallelism.train
    if device is not None:
        spec, train = connects(spec, 2, tmp_path), faults_while_switched(train)
    outcome, run = with_faults(spec, train, faults, device=device)
    assert (outcome.error, outcome.workers_lost) == (None, len(faults)), losses_of(run)
    assert outcome.digest == calm(parallelism, outcome.step)[0].digest


def connects(spec: JobSpec, workers: int, tmp_path: Any) -> JobSpec:
    """The job, whose bodies wait until the devices of so many workers are connected."""
    told = {"hold": {0: workers}, "size": workers, "switched": str(tmp_path / "switched")}
    return dataclasses.replace(spec, config=spec.config | told)


@SLOW
@pytest.mark.parametrize(
    ("parallelism", "process"),
    [named(one, process) for one in PARALLELISMS for process in (0, one.processes - 1)],
)
@pytest.mark.parametrize("point", ["forming", "sending_state", "receiving_state"])
def test_process_may_die_while_a_joiner_gets_the_state(
    parallelism: Parallelism, process: int, point: str, tmp_path: Any
) -> None:
    check_kill_while_a_joiner_gets_the_state(parallelism, process, point, tmp_path)


def check_kill_while_a_joiner_gets_the_state(
    parallelism: Parallelism,
    process: int,
    point: str,
    tmp_path: Any,
    device: SimulatedDevice | None = None,
) -> None:
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    faults = (
        WorkerFault("backward", rank=2, world_size=3, once=first, settled=True),
        WorkerFault(point, world_size=3, process=process, once=second, after=(first,)),
    )
    config = {"body_s": 0.05}
    spec = parallelism.spec(3, steps=ENDLESS, min_workers=1, standby=1, config=config)
    outcome, run = with_faults(spec, parallelism.train, faults, device=device)
    assert (outcome.error, outcome.workers_lost) == (None, 2), losses_of(run)
    assert outcome.digest == calm(parallelism, outcome.step)[0].digest
