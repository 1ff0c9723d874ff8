"""A sharded optimizer whose state is on a device. It has the bits of the processor, over both
transports, and nobody commits a step that a device has not done.

The simulated device shows what is read too early, the fake GPU what mixes the devices.
"""

import threading
from functools import partial

import pytest
import torch

from elastic_dp.device.accelerator import install
from elastic_dp.distributed.device_transport import DeviceTransport
from tests.checkpoint.states import memory_store
from tests.device import fake_gpu
from tests.distributed.members import of_each_on_devices as of_each
from tests.distributed.test_device_transport import switch
from tests.kit.again import again, slow
from tests.kit.simulated_device import SimulatedDevice
from tests.runs import group, in_turn, losses_of
from tests.train import test_sharded_optimizer as of_runs
from tests.train.jobs import average_and_plateau, batch_norm, in_small_buckets, plain
from tests.train.sharding import test_sharded_state as of_members
from tests.train.sharding.test_checkpoint_units import restore, written_by
from tests.train.sharding.test_sharded_state import (
    ADAM,
    SHAPES,
    Member,
    _dropped_here,  # noqa: F401  a fixture
    _small_units,  # noqa: F401  a fixture
    check_equal,
    check_held,
    enter,
    four,
    new_member,
    of_kind,
    plain_after,
)
from tests.train.test_kills import with_faults
from tests.train.test_simulated_device import faults_while_switched, told_when_switched, waits_once
from tests.train.test_simulated_device import job as job_on_a_device

SLOW = pytest.mark.slow
TRANSPORTS = (pytest.param("Gloo", marks=SLOW), "communicator")


@pytest.fixture(autouse=True)
def _no_device_is_left():
    yield
    install(None)


def over(transport, world_size, act, place=None):
    """What `act` returns for each rank of a group on a device."""

    def acts(group):
        if transport == "communicator" and world_size > 1:
            switch(group)
        return act(group)

    return of_each(world_size, acts, place=place)


# An Adam that counts its steps on the host would read a number that the simulated device has not
# computed yet: there all memory is the device's.
CASES = [
    (ADAM, None),
    (of_kind(torch.optim.AdamW, fused=True), 0.5),
    (of_kind(torch.optim.SGD, momentum=0.9), 0.5),
    (of_kind(torch.optim.Adafactor), None),
]


def check_cases(cases, group):
    torch.set_num_threads(1)
    for make, clip_norm in cases:
        member = Member(make, SHAPES, torch.float32, clip_norm=clip_norm)
        if group.rank:
            member.sharding.forget(0)
        member.sharding.open(group, 1, ())
        plain = Member(make, SHAPES, torch.float32, shard=False, clip_norm=clip_norm)
        for _ in range(of_members.STEPS):
            member.attempt()
            plain.plain_step()
        group.synchronize()
        check_held(member, plain)
        assert 0 < len(member.sharding.held) < len(member.sharding.pieces)
        member.sharding.close()


@pytest.mark.parametrize("transport", ["Gloo", "communicator"])
def test_step_on_a_simulated_device_has_the_bits_of_the_processor(transport):
    over(transport, 3, partial(check_cases, CASES))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_parameters_are_gathered_once_the_devices_of_all_have_them(transport, monkeypatch):
    """A member whose collectives are aborted hands on whatever it has."""
    armed, gathered, read = threading.Event(), threading.Event(), DeviceTransport.read

    def reads(transport, tensors):
        if armed.is_set() and transport.rank == 1:
            assert not gathered.wait(0.5)
        return read(transport, tensors)

    monkeypatch.setattr(DeviceTransport, "read", reads)

    def train(group):
        member = new_member()
        if group.rank:
            member.sharding.forget(0)
        member.sharding.open(group, 1, ())
        group.gather_bytes(b"")
        armed.set()
        member.attempt(commits=False)
        gathered.set()
        member.sharding.close()

    over(transport, 3, train)


@pytest.fixture
def _simulated(request, monkeypatch):
    """Members of other tests have a simulated device."""
    monkeypatch.setattr(of_members, "of_each", partial(over, request.param))


@pytest.fixture(params=TRANSPORTS)
def gpu(request, monkeypatch):
    """Members of other tests have a fake GPU. Returns how to run some."""
    install(None)
    fake_gpu.install(partial(monkeypatch.setattr, raising=False))
    run = partial(over, request.param, place=fake_gpu.GPU)
    monkeypatch.setattr(of_members, "of_each", run)
    monkeypatch.setattr(of_members, "DEVICE", fake_gpu.GPU)
    with fake_gpu.modes():
        yield run


SURVIVES = of_members.test_state_survives_losses_joins_and_aborts_at_any_instant
BACKUP = of_members.test_backup_with_other_bits_than_its_primary_is_found_before_the_commit
BEHIND = of_members.test_member_behind_holds_what_it_prepared_when_another_has_committed
ABORT = of_members.test_aborted_step_leaves_state_as_it_was_and_is_done_again_with_the_same_bits


@pytest.mark.usefixtures("_simulated")
@pytest.mark.parametrize("_simulated", TRANSPORTS, indirect=True)
@pytest.mark.parametrize(
    "rerun",
    [
        *again(SURVIVES, seed=[0]),
        *slow(SURVIVES, seed=range(1, 6)),
        *slow(BEHIND),
        *slow(ABORT),
        *again(BACKUP),
    ],
)
def test_members_with_simulated_devices(rerun, request):
    rerun(request)


def test_step_on_a_fake_gpu_mixes_no_devices_and_has_the_bits_of_the_processor(gpu):
    gpu(3, partial(check_cases, [*CASES, (ADAM, 0.5)]))


def test_units_are_restored_to_the_device_that_they_were_on(gpu):
    members = four()
    enter(members, Member.attempt)
    catalog, _ = written_by(members, memory_store())
    gpu(4, lambda group: restore(group, catalog, members[group.rank]))
    for member in members:
        state = next(state for state in member.sharding.held.values() if state)
        places = {key: value.device.type for key, value in state.items()}
        assert places == {"step": "cpu", "exp_avg": "cuda", "exp_avg_sq": "cuda"}
    enter(members, Member.attempt)
    check_equal(members, plain_after(2))


@pytest.mark.parametrize(
    ("train", "workers"),
    [
        (batch_norm, 3),
        pytest.param(plain, 2, marks=SLOW),
        pytest.param(in_small_buckets(batch_norm), 4, marks=SLOW),
    ],
)
def test_host_waits_twice_for_the_device_in_a_sharded_step(train, workers, tmp_path):
    """Before it sends its header, and before the commit. With two workers, once."""
    spec = of_runs.sharded(job_on_a_device(tmp_path, workers=workers, steps=12))
    trained = waits_once(
        of_runs.in_small_units(train), times=lambda members: 2 if members > 2 else 1
    )
    outcome, _ = group(spec, told_when_switched(trained), device=SimulatedDevice())
    of_runs.check(outcome, train, spec)


IN_CI = ("gather", "prepared", "gathered", "after_commit")
OTHERS = ("sent", "exchange", "header", "before_commit", "optimizer", "after_step")


@pytest.mark.parametrize(
    ("points", "train", "workers"),
    [
        pytest.param(IN_CI, batch_norm, 3, id="in CI"),
        pytest.param(IN_CI, average_and_plateau, 4, id="four", marks=SLOW),
        pytest.param(OTHERS, average_and_plateau, 4, id="others", marks=SLOW),
    ],
)
def test_kill_in_a_sharded_step_that_uses_the_communicator_costs_no_state(
    points, train, workers, tmp_path
):
    """One rank after another, the group back at full size in between."""
    deaths = [{"point": point, "rank": i % workers} for i, point in enumerate(points)]
    faults = in_turn(deaths, tmp_path, world_size=workers, settled=True)
    spec = of_runs.job(workers=workers)
    trained = faults_while_switched(of_runs.in_small_units(train))
    spec.config["switched"], spec.config["size"] = str(tmp_path / "switched"), workers
    outcome, run = with_faults(spec, trained, faults, device=SimulatedDevice(abort_s=1.0))
    assert outcome.workers_lost == len(faults), losses_of(run)
    of_runs.check(outcome, train, spec, run)
