"""Workers of several processes: torch's `fully_shard` within a worker, our sums between them. The
weights are the same for any number of workers, whatever happens to any process."""

import dataclasses
import functools
import hashlib

import pytest
import safetensors.torch

from elastic_dp.checkpoint.catalog import Catalog
from elastic_dp.checkpoint.exporting import export
from elastic_dp.config import CheckpointConfig
from elastic_dp.storage import Store
from elastic_dp.train.fault_injection import WorkerFault
from tests.runs import ENDLESS, group, in_turn, lines_of, local, losses_of, scaled
from tests.train.gang.jobs import STEPS, gangs, trains
from tests.train.jobs import classifier, classify
from tests.train.test_kills import IN_A_STEP, with_faults
from tests.train.test_simulated_device import faults_while_switched

IN_A_STEP_OF_GANGS = [point for point in IN_A_STEP if point != "buffers"]
SLOW = pytest.mark.slow


@functools.cache
def calm(steps=STEPS):
    """An undisturbed run of one gang, on the processor."""
    outcome, run = group(gangs(1, steps=steps), trains)
    assert (outcome.step, outcome.error) == (steps, None), losses_of(run)
    return outcome, run


def test_gang_trains_as_one_process_does_on_the_same_rows():
    """Losses, norms, metrics and evaluations are those of one process, dropout included."""
    logged = [x for x in lines_of(calm()[1]) if "norm" in x or "eval_loss" in x]
    expected = local(scaled(gangs(1), processes_per_worker=1, virtual_workers=8), trains).logged
    assert len(logged) == len(expected)
    for one, other in zip(logged, expected, strict=True):
        assert one == pytest.approx({**one, **other}, rel=1e-4)


@pytest.mark.parametrize("process", [pytest.param(0, marks=SLOW), 1])
def test_loss_of_a_process_costs_its_gang_and_no_step(process, tmp_path):
    once = str(tmp_path / "once")
    fault = WorkerFault("backward", 3, rank=1, world_size=2, process=process, once=once)
    spec = gangs(2, config={"body_s": 0.05})
    outcome, run = group(spec, trains, faults=(fault,))
    assert outcome.workers_lost == 1, losses_of(run)
    assert (outcome.digest, outcome.inexact_because) == (calm()[0].digest, ())


def test_run_that_was_stopped_goes_on_with_another_number_of_gangs_and_the_same_rows(tmp_path):
    """The last checkpoint is exported whole, and other rows for the processes are refused."""
    first = gangs(2, steps=4, checkpoint=CheckpointConfig(every_steps=2))
    outcome, run = group(first, trains, url=str(tmp_path))
    assert outcome.step == 4, losses_of(run)
    outcome, run = group(gangs(1), trains, url=str(tmp_path))
    undisturbed = calm()[0].digest
    assert (outcome.step, outcome.digest) == (STEPS, undisturbed), losses_of(run)
    assert digest_of_export(str(tmp_path), classifier()) == undisturbed
    other = scaled(gangs(1, steps=12), processes_per_worker=1)
    outcome, _ = group(other, classify, url=str(tmp_path), fails=True)
    assert "processes_per_worker is 1, but the newest checkpoint" in str(outcome.error)


def digest_of_export(url, model):
    """Returns the digest of the weights in a file that is exported from the newest checkpoint of
    this model."""
    catalog, file = Catalog(Store(url)), f"{url}/exported.safetensors"
    export(catalog, catalog.read(catalog.names()[-1]), file)
    exported, digest = safetensors.torch.load_file(file), hashlib.sha256()
    for name, p in model.named_parameters():
        digest.update(f"{name} {tuple(p.shape)} {p.dtype}\n".encode())
        digest.update(exported[name].numpy().tobytes())
    return digest.hexdigest()


@SLOW
@pytest.mark.parametrize("workers", [2, 3])
def test_any_number_of_gangs_has_the_digest_of_one(workers):
    outcome, run = group(gangs(workers), trains)
    assert outcome.digest == calm()[0].digest, losses_of(run)


@SLOW
@pytest.mark.parametrize("point", IN_A_STEP_OF_GANGS)
def test_any_process_may_die_at_any_point_of_a_step(point, tmp_path):
    check_kills_of_each_process(point, tmp_path)


def check_kills_of_each_process(point, tmp_path, device=None, **where):
    """One after another dies at `point`, with all gangs there."""
    deaths = [{"rank": rank, "process": process} for rank in range(2) for process in range(2)]
    faults = in_turn(deaths, tmp_path, point=point, world_size=2, settled=True)
    config = {"body_s": 0.05}
    spec = gangs(2, steps=ENDLESS, min_workers=1, standby=1, config=config)
    train = trains
    if device is not None:
        spec, train = connects(spec, 2, tmp_path), faults_while_switched(train)
    if where:
        spec = scaled(spec, nodes_per_worker=2)
    outcome, run = with_faults(spec, train, faults, device=device, **where)
    assert (outcome.error, outcome.workers_lost) == (None, len(faults)), losses_of(run)
    assert outcome.digest == calm(outcome.step)[0].digest


def connects(spec, workers, tmp_path):
    """The job, whose bodies wait until the devices of so many workers are connected."""
    told = {"hold": {0: workers}, "size": workers, "switched": str(tmp_path / "switched")}
    return dataclasses.replace(spec, config=spec.config | told)


@SLOW
@pytest.mark.parametrize("process", [0, 1])
@pytest.mark.parametrize("point", ["forming", "sending_state", "receiving_state"])
def test_process_may_die_while_a_joiner_gets_the_state(process, point, tmp_path):
    check_kill_while_a_joiner_gets_the_state(process, point, tmp_path)


def check_kill_while_a_joiner_gets_the_state(process, point, tmp_path, device=None, **where):
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    faults = (
        WorkerFault("backward", rank=2, world_size=3, once=first, settled=True),
        WorkerFault(point, world_size=3, process=process, once=second, after=(first,)),
    )
    config = {"body_s": 0.05}
    spec = gangs(3, steps=ENDLESS, min_workers=1, standby=1, config=config)
    if where:
        spec = scaled(spec, nodes_per_worker=2)
    outcome, run = with_faults(spec, trains, faults, device=device, **where)
    assert (outcome.error, outcome.workers_lost) == (None, 2), losses_of(run)
    assert outcome.digest == calm(outcome.step)[0].digest
