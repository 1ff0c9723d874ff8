"""Workers of several processes whose parts are on devices: on the simulated one, and what only the
fake GPU tells apart. The weights are those of the processor."""

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from elastic_dp.config import CheckpointConfig
from elastic_dp.distributed.local_shards import local_of, whole_of
from elastic_dp.errors import ClusterError, ModelError
from elastic_dp.extensions.gangs import check_gang, gang_mesh
from elastic_dp.extensions.gangs.gang_mesh import kind_of_gang
from elastic_dp.train.fault_injection import WorkerFault
from elastic_dp.train.gang import Gang
from elastic_dp.train.state.train_state import TrainState
from tests.device import fake_gpu
from tests.imported_when_used import ImportedWhenUsed
from tests.kit.simulated_device import SimulatedDevice
from tests.runs import group, losses_of
from tests.train.gang.jobs import gangs, trains
from tests.train.gang.test_kills_of_processes import (
    IN_A_STEP_OF_GANGS,
    calm,
    check_kill_while_a_joiner_gets_the_state,
    check_kills_of_each_process,
    connects,
)
from tests.train.jobs import adamw, classifier, cross_entropy
from tests.train.step.test_participants import Told
from tests.train.test_simulated_device import faults_while_switched

fsdp = ImportedWhenUsed("torch.distributed.fsdp")

SLOW, ROOT = pytest.mark.slow, Path(__file__).parents[2]


def test_loss_of_a_process_while_devices_are_connected_costs_its_gang_and_no_step(tmp_path):
    fault = WorkerFault("gather", rank=1, process=1, world_size=2, once=str(tmp_path / "dead"))
    spec = connects(gangs(2, min_workers=1, standby=1), 2, tmp_path)
    train = faults_while_switched(trains)
    outcome, run = group(spec, train, faults=(fault,), device=SimulatedDevice())
    assert (outcome.error, outcome.workers_lost) == (None, 1), losses_of(run)
    assert (tmp_path / "switched").exists()
    assert (outcome.digest, outcome.inexact_because) == (calm()[0].digest, ())


@SLOW
@pytest.mark.parametrize("point", IN_A_STEP_OF_GANGS)
def test_any_process_may_die_at_any_point_of_a_step_on_devices(point, tmp_path):
    check_kills_of_each_process(point, tmp_path, SimulatedDevice())


@SLOW
@pytest.mark.parametrize("process", [0, 1])
@pytest.mark.parametrize("point", ["sending_state", "receiving_state"])
def test_process_may_die_while_a_joiner_gets_the_state_of_devices(point, process, tmp_path):
    device = SimulatedDevice()
    check_kill_while_a_joiner_gets_the_state(process, point, tmp_path, device)


@SLOW
def test_run_on_devices_goes_on_from_its_checkpoint_with_another_number_of_gangs(tmp_path):
    first = gangs(2, steps=4, checkpoint=CheckpointConfig(every_steps=2))
    outcome, run = group(first, trains, url=str(tmp_path), device=SimulatedDevice())
    assert outcome.step == 4, losses_of(run)
    outcome, run = group(gangs(1), trains, url=str(tmp_path), device=SimulatedDevice())
    assert (outcome.step, outcome.digest) == (8, calm()[0].digest), losses_of(run)


@pytest.fixture
def mesh(monkeypatch):
    """Returns what makes a mesh of this process alone, on the fake GPU."""
    fake_gpu.install(partial(monkeypatch.setattr, raising=False))
    with fake_gpu.modes():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            yield DeviceMesh.from_group(dist.group.WORLD, "cuda", mesh_dim_names=("dp",))
        finally:
            dist.destroy_process_group()


def test_state_is_gathered_on_the_host_and_restored_to_the_gpu(mesh):
    """The whole may be too large for the memory of one GPU."""
    model = fsdp.fully_shard(classifier().to(fake_gpu.GPU), mesh=mesh)
    optimizer = adamw(model)
    batch = {"x": torch.ones(4, 16).to(fake_gpu.GPU), "y": torch.zeros(4).long().to(fake_gpu.GPU)}
    cross_entropy(model, batch).backward()
    optimizer.step()
    state = TrainState(model, optimizer, None, None, {})
    tree = state.tree([], None, whole=True)
    before = tree["step"]["parameters"] + [one["exp_avg"] for one in tree["step"]["optimizer"]]
    assert [one.device.type for one in before] == 12 * ["cpu"]
    optimizer.step()
    state.adopt(tree, body=True)
    after = [*model.parameters(), *(optimizer.state[p]["exp_avg"] for p in model.parameters())]
    assert [local_of(one).device for one in after] == 12 * [fake_gpu.GPU]
    for one, other in zip(before, after, strict=True):
        assert torch.equal(one, whole_of(other))


def test_model_whose_parts_are_kept_on_the_host_is_refused(mesh):
    model = fsdp.fully_shard(
        classifier(), mesh=mesh, offload_policy=fsdp.CPUOffloadPolicy(pin_memory=False)
    )
    gang = Gang(0, 1, mesh, Told())
    with pytest.raises(ModelError, match="leave out CPUOffloadPolicy"):
        check_gang(gang, model, None)


def test_kind_of_a_worker_tells_how_its_gpus_add(mesh, monkeypatch):
    monkeypatch.setattr(gang_mesh, "_SIZES", (64,))
    gang = Gang(0, 1, mesh, Told())
    kind = kind_of_gang(gang, "fake GPU", fake_gpu.GPU)
    assert kind == kind_of_gang(gang, "fake GPU", fake_gpu.GPU) != "fake GPU"
    in_another_order = Gang(1, 1, mesh, Told())
    assert kind != kind_of_gang(in_another_order, "fake GPU", fake_gpu.GPU)
    assert kind_of_gang(gang, "CPU", torch.device("cpu")) == "CPU"


def test_worker_whose_gpus_differ_is_refused():
    gang = Gang(0, 2, None, Told(b"A100"))
    with pytest.raises(ClusterError, match=r"H100 \| A100.*label_selector"):
        kind_of_gang(gang, "H100", fake_gpu.GPU)
