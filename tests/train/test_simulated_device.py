"""Whole runs on a device with CUDA's semantics: the same digests as on the processor, whichever way
the gradients take, and one wait for the device in a step."""

import dataclasses
import math
import os
import sys
import threading

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from elastic_dp.config import MapStyleData
from elastic_dp.coordinator.messages import Cause, SizeRequested, StopRequested
from elastic_dp.device.accelerator import accelerator_of
from elastic_dp.distributed import abandoned_groups, device_connection
from elastic_dp.distributed.device_transport import DeviceTransport
from elastic_dp.train.fault_injection import HANDING_OVER, WorkerFault
from elastic_dp.train.generations import generation_groups
from elastic_dp.train.local_run import LocalRun
from tests.cluster.test_budgets import is_first
from tests.kit.again import again, slow
from tests.kit.simulated_device import SimulatedCommunicator, SimulatedDevice
from tests.patience import PATIENCE_S, eventually
from tests.runs import (
    ENDLESS,
    Points,
    at_size,
    goes_on,
    group,
    in_turn,
    lines_of,
    local,
    losses_of,
    spec_of,
)
from tests.train import test_finished_work, test_kills, test_notice
from tests.train.checkpointing import test_collective_read, test_worker_checkpointer
from tests.train.jobs import average_and_plateau, batch_norm, in_small_buckets, plain

SLOW = pytest.mark.slow
JOINS_IN_CI = (("receiving_state", 3),)


def transport(ctx):
    main = ctx._session.groups.main
    return None if main is None else main.on_device


def told_when_switched(train):
    """Writes the file ctx.config["switched"] in the first body after a step whose gradients the
    device's communicator has carried, with as many members as ctx.config["size"]. Bodies wait until
    it stands."""

    def tells(ctx):
        session = ctx._session
        if not isinstance(session.link, LocalRun):
            begins = session._body_begins

            def body_begins(record):
                of_device = transport(ctx)
                if of_device is not None and session.world_size > 1:
                    over = session.control._over
                    tried = of_device.connecting_failure
                    eventually(lambda: of_device.connected or tried() or over())
                    if of_device.switched and session.world_size == ctx.config.get("size"):
                        with open(ctx.config["switched"], "w", encoding="utf-8") as file:
                            file.write("0")  # a fault may happen after it in any generation
                return begins(record)

            session._body_begins = body_begins
        train(ctx)

    return tells


def faults_while_switched(train):
    """Faults of a step happen only in one that uses the device's communicator from its beginning
    on. So if they have happened, it was in use."""

    def switched(ctx):
        session, used = ctx._session, [None]  # in which generation the present step does
        point, may_attempt = session.faults.point, session.control.may_attempt

        def passes(name, step, rank, world_size, generation):
            if name in HANDING_OVER or used[0] == generation:
                point(name, step, rank, world_size, generation)

        def begins(step):
            of_device = transport(ctx)
            switched = of_device is not None and of_device.switched
            used[0] = session.generation if switched else None
            return may_attempt(step)

        session.faults.point, session.control.may_attempt = passes, begins
        told_when_switched(train)(ctx)

    return switched


def job(tmp_path, *, workers=3, steps=40, virtual=4, **options):
    config = {"hold": {0: workers}, "size": workers, "switched": str(tmp_path / "switched")}
    config["eval"] = MapStyleData(Points(60), micro_batch_size=8)
    return spec_of(steps=steps, workers=workers, virtual=virtual, config=config, **options)


@pytest.mark.parametrize(
    ("train", "workers"),
    [
        (batch_norm, 3),
        pytest.param(average_and_plateau, 2, marks=pytest.mark.slow),
        pytest.param(plain, 3, marks=pytest.mark.slow),
    ],
)
def test_run_on_a_device_has_the_local_digest_over_both_transports(train, workers, tmp_path):
    spec = job(tmp_path, workers=workers, steps=12)
    outcome, _ = group(spec, told_when_switched(train), device=SimulatedDevice())
    assert outcome.digest == local(spec, train).digest
    assert (tmp_path / "switched").exists()


# Who reads what is on the host also where a GPU computes; and torch's optimizers, whose counts are.
ON_THE_HOST = {
    "DeviceTransport.read",  # counted as a wait
    "GradientExchange._complete",
    "ModuleBuffers._payload",
    "ModuleBuffers.take",
    "RecordGather._make_room",
    "RecordGather.collect",
    "ShardedOptimizer.gather",
    "ProcessGroup.gather_bytes",
    "ProcessGroup.gather_equal",
    "take_read",
    "_sampled_view",  # nothing of a device's
    "digest_of",
    "squares_of_units",  # to the device of the gradients themselves
}
OPTIMIZERS = os.path.dirname(torch.optim.__file__)


class Reads(TorchFunctionMode):
    """Notes where a thread reads a tensor in a way for which the host waits for its device."""

    NAMES = frozenset(
        """item __float__ __bool__ __int__ __index__ __complex__ cpu numpy __array__ tolist equal
        allclose is_nonzero nonzero argwhere masked_select unique unique_consecutive
        repeat_interleave bincount""".split()  # noqa: SIM905
    )

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        to_host = name == "to" and any(
            str(one) == "cpu" for one in (*args[1:], (kwargs or {}).get("device"))
        )
        by_mask = name in ("__getitem__", "__setitem__") and any(
            isinstance(one, torch.Tensor) and one.dtype == torch.bool
            for one in tree_leaves(args[1:])
        )
        if name in self.NAMES or to_host or by_mask:
            reader = sys._getframe(1)
            callers = [reader.f_code.co_qualname, reader.f_back.f_code.co_qualname]
            named = {one.partition(".<locals>")[0] for one in callers}
            if not named & ON_THE_HOST and OPTIMIZERS not in reader.f_code.co_filename:
                self.found.append(" in ".join([name, *callers]))
        return func(*args, **(kwargs or {}))


def waits_once(train, times=lambda members: 1):
    """Fails if the host waits for the device more than once from the beginning of a step to that of
    the next one, or as often as `times` says."""

    def counted(ctx):
        session, reads, polls = ctx._session, Reads(), [0]
        began, steps = [None], [0]  # in which generation, if the communicator was used
        poll, may_attempt = DeviceTransport._poll, session.control.may_attempt

        def counting(self, event):
            polls[0] += 1
            poll(self, event)

        def begins(step):
            of_device = transport(ctx)
            if began[0] == session.generation:
                wanted = times(session.world_size)
                assert (polls[0], reads.found) == (wanted, []), (polls, reads.found)
                steps[0] += 1
            used = of_device is not None and of_device.switched
            began[0] = session.generation if used else None
            polls[0] = 0
            reads.found.clear()
            return may_attempt(step)

        DeviceTransport._poll = counting
        session.control.may_attempt = begins
        with reads:
            train(ctx)
        assert steps[0] >= 3

    return counted


@pytest.mark.parametrize(
    ("train", "virtual"),
    [
        (in_small_buckets(batch_norm), 8),
        pytest.param(plain, 4, marks=pytest.mark.slow),
        pytest.param(in_small_buckets(plain), 8, marks=pytest.mark.slow),
        pytest.param(batch_norm, 4, marks=pytest.mark.slow),
    ],
)
def test_step_waits_once_for_the_device_whatever_its_buckets_leaves_and_buffers(
    train, virtual, tmp_path
):
    spec = job(tmp_path, workers=2, steps=12, virtual=virtual)
    group(spec, told_when_switched(waits_once(train)), device=SimulatedDevice())


# Where the communicator is in use, or its results are not applied yet.
AT_RISK = ("forward", "sent", "exchange", "gather", "header", "before_commit", "after_commit")
# But "buffers", which not all jobs have.
OTHERS = tuple(p for p in test_kills.IN_A_STEP if p not in (*AT_RISK, "buffers"))


@pytest.mark.parametrize(
    "points", [pytest.param(AT_RISK, id="at risk"), pytest.param(OTHERS, id="others", marks=SLOW)]
)
def test_kill_in_a_step_that_uses_the_communicator_has_the_local_digest(points, tmp_path):
    """One rank after another, the group back at full size in between. The survivors' device spins
    until their communicator is aborted. Then they go on."""
    deaths = [{"point": point, "rank": i % 3} for i, point in enumerate(points)]
    faults = in_turn(deaths, tmp_path, world_size=3, settled=True)
    trained = faults_while_switched(in_small_buckets(average_and_plateau))
    # The abort blocks after it has freed the device; nobody waits for that.
    device = SimulatedDevice(abort_s=1.0)
    outcome, run = test_kills.with_faults(test_kills.job(), trained, faults, device=device)
    test_kills.check(outcome, run, average_and_plateau, kills=len(faults))


@pytest.mark.parametrize(
    ("virtual", "finished_by"),
    [
        (8, [((2, 4), (4, 5)), ((5, 6), (6, 8))]),
        pytest.param(12, [((4, 8),), ((8, 12),)], marks=SLOW),
    ],
    ids=["two subtrees each", "one subtree each"],
)
def test_finished_work_on_a_device_is_used_again(virtual, finished_by, tmp_path):
    """The host has launched the additions and the gather by the time a peer is lost. The third
    worker may join some steps after the others; two steps later all use the communicator."""
    step = 10
    spec = job(tmp_path, steps=13, virtual=virtual, min_workers=2)
    dead = WorkerFault("sent", step, rank=0, once=str(tmp_path / "dead"))
    counted = test_finished_work.counted(tmp_path)
    trained = test_finished_work.waits_for_the_others(counted, tmp_path, "send", step)
    outcome, run = group(
        spec, faults_while_switched(trained), faults=(dead,), device=SimulatedDevice()
    )
    assert outcome.workers_lost == 1, losses_of(run)
    stops = [line for line in lines_of(run) if line.get("event") == "WorkerStopped"]
    cut = [stop for stop in stops if stop["position"].step == step - 1]  # one may be told twice
    finished = {stop["worker"]: stop["finished"] for stop in cut}
    assert sorted(finished.values()) == finished_by
    times = test_finished_work.passes(tmp_path, step)
    lost = finished_by[0][0][0]  # the virtual workers of rank 0
    assert len(times) == virtual and sum(times.values()) == virtual + lost
    assert outcome.digest == local(spec, test_finished_work.counted(tmp_path)).digest


def loads_kernels(train):
    """Writes into the file ctx.config["loaded"] which worker loads kernels before it joins, and on
    which thread."""

    def loading(ctx):
        load = generation_groups.load_kernels

        def loads(accelerator):
            assert ctx._session.generation == 0
            thread = threading.current_thread().name
            with open(ctx.config["loaded"], "a", encoding="utf-8") as file:
                file.write(f"{ctx._session.worker} {thread}\n")
            return load(accelerator)

        generation_groups.load_kernels = loads
        train(ctx)

    return loading


def test_joiner_loads_the_kernels_of_the_device_before_it_joins(tmp_path):
    """The source of the first generation does it while that connects. No thread of the training
    has a reference to that communicator: to destroy it may block."""
    spec = job(tmp_path, workers=2, steps=4)
    spec.config["loaded"] = str(tmp_path / "loaded")
    _, run = group(spec, loads_kernels(plain), device=SimulatedDevice())
    lines = (tmp_path / "loaded").read_text(encoding="utf-8").splitlines()
    loaded = [line.split()[0] for line in lines]
    assert {line.split()[1] for line in lines} == {"kernels"}
    started = [x["worker"] for x in lines_of(run) if x.get("command") == "BeginTraining"]
    joiners = {x["worker"] for x in lines_of(run) if x.get("is_source") is False}
    assert set(loaded) == joiners < set(started)


def device_fails_while_it_connects():
    def connect(self, check):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    SimulatedCommunicator.connect = connect


def test_worker_whose_device_fails_while_it_connects_is_lost(tmp_path):
    """The generation goes on without the communicator, and would never look at that worker's
    device. The run goes on until it is lost."""
    spec, fails = job(tmp_path, workers=2, steps=ENDLESS), str(tmp_path / "fails")
    spec.config["body_s"] = 0.02
    trained = in_one_worker(plain, fails, device_fails_while_it_connects)

    def lost_it(run):
        eventually(lambda: "WorkerLost" in losses_of(run) or run.controller.ended.is_set())
        goes_on(run)

    script = [(1, lost_it), (1, StopRequested("enough"))]
    outcome, run = group(spec, trained, script=script, device=SimulatedDevice())
    lost = [line for line in lines_of(run) if line.get("event") == "WorkerLost"]
    assert Cause.DEVICE_FAULT in [line["cause"] for line in lost]
    calm = local(dataclasses.replace(spec, max_steps=outcome.step), plain)
    assert (outcome.digest, outcome.workers_lost) == (calm.digest, 1)


def in_one_worker(train, file, act):
    """`act()` in the first worker that comes to its train function, but for the source."""

    def acts(ctx):
        if not ctx.is_source and is_first(file):
            act()
        train(ctx)

    return acts


def abort_never_ends(train, file, frees):
    """In rank 1 of the first group of three; then `file` exists."""

    def hangs(ctx):
        faults = ctx._session.faults
        point = faults.point

        def passes(name, step, rank, world_size, generation):
            if (name, rank, world_size) == ("forming", 1, 3) and is_first(file):
                device_connection.ABORT_LIMIT_S = 0.3
                accelerator = accelerator_of(torch.device("cpu"))
                options = {"abort_s": math.inf, "abort_frees": frees}
                accelerator.settings = dataclasses.replace(accelerator.settings, **options)
            point(name, step, rank, world_size, generation)

        faults.point = passes
        train(ctx)

    return hangs


@pytest.mark.parametrize("frees", [True, False])
def test_worker_whose_abort_never_ends_is_lost_and_the_others_go_on(frees, tmp_path):
    """Whether or not its device was freed before."""
    hangs = str(tmp_path / "hangs")
    fault = WorkerFault("gather", rank=0, world_size=3, once=str(tmp_path / "dead"), settled=True)
    trained = abort_never_ends(plain, hangs, frees)

    def lost(run):
        ends = [x for x in lines_of(run) if x.get("event") == "WorkerLost"]
        return {x["worker"] for x in ends if x["cause"] is not Cause.RELEASED}

    def both_lost(run):  # the others may go on before the second one ends
        eventually(lambda: len(lost(run)) == 2 or run.controller.ended.is_set())
        goes_on(run)

    outcome, run = group(
        test_kills.job(),
        faults_while_switched(trained),
        faults=(fault,),
        script=[(1, both_lost), (1, StopRequested("enough"))],
        device=SimulatedDevice(),
    )
    assert os.path.exists(hangs)
    assert outcome.workers_lost == 2, losses_of(run)
    assert outcome.digest == test_kills.calm(outcome.step, plain).digest


def destroyed_at_once(train, file):
    """Groups that were left are dropped when the next one forms; `file` has a line for each
    communicator that is destroyed then, with its thread. An abort has any time, since a worker that
    gets no processor is not one whose abort blocks."""

    def drops(ctx):
        destroy = SimulatedCommunicator.__del__

        def noted(self):
            with open(file, "a", encoding="utf-8") as told:
                told.write(f"{threading.current_thread().name}\n")
            destroy(self)

        SimulatedCommunicator.__del__ = noted
        abandoned_groups.REST_S, device_connection.ABORT_LIMIT_S = 0.0, PATIENCE_S
        train(ctx)

    return drops


def test_run_whose_communicators_are_never_destroyed_to_the_end_has_the_local_digest(tmp_path):
    """To destroy one blocks for ever. So no thread of the training does it."""
    file = tmp_path / "destroyed"
    fault = WorkerFault("gather", rank=1, world_size=3, once=str(tmp_path / "dead"), settled=True)
    trained = faults_while_switched(destroyed_at_once(plain, str(file)))

    def ended(run):
        eventually(lambda: os.path.exists(fault.once))
        for size in (2, 3):  # by planned ends, too
            run.controller.post(SizeRequested(size))
            at_size(size)(run)
        eventually(lambda: file.exists() and len(file.read_text().split()) >= 4)

    spec = spec_of(steps=ENDLESS, standby=1, config={"body_s": 0.1})
    outcome, run = group(
        spec,
        trained,
        faults=(fault,),
        script=[(1, ended), (1, StopRequested("enough"))],
        device=SimulatedDevice(destroy_s=math.inf),
    )
    assert outcome.workers_lost == 1, losses_of(run)
    assert outcome.digest == local(spec_of(steps=outcome.step), plain).digest
    threads = set(file.read_text(encoding="utf-8").split())
    assert not threads & {"MainThread", "control"}, threads


@pytest.fixture
def _simulated(monkeypatch):
    """Faults of a step happen while the communicator is in use."""
    monkeypatch.setenv("ELASTIC_DP_SIMULATED_DEVICE", "1")
    with_faults = test_kills.with_faults

    def switched(spec, train, faults):
        return with_faults(spec, faults_while_switched(train), faults)

    monkeypatch.setattr(test_kills, "with_faults", switched)
    # The header goes out last, behind the exchange.
    nobody = tuple(point for point in test_kills.NOBODY_COMMITS if point != "header")
    monkeypatch.setattr(test_kills, "NOBODY_COMMITS", nobody)


@pytest.fixture
def calm():
    return local(test_collective_read.spec_for(3), test_collective_read.wide)


@pytest.fixture
def there(tmp_path):
    """Checkpoints of two workers."""
    spec, folder = test_collective_read.spec_for(2, steps=10), tmp_path / "run"
    group(spec, test_collective_read.wide, url=str(folder), device=SimulatedDevice())
    return folder


HAND_OVER = test_kills.test_killed_half_way_through_a_joiners_hand_over
TO_ONE_BEHIND = test_kills.test_killed_half_way_through_the_hand_over_to_one_behind
JOIN = test_kills.test_killed_while_a_generation_forms


@pytest.mark.usefixtures("_simulated")
@pytest.mark.parametrize(
    "rerun",
    [
        *slow(test_kills.test_kill_at_each_point_has_the_local_digest, point=test_kills.IN_A_STEP),
        *again(JOIN, seconds=[JOINS_IN_CI]),
        *slow(JOIN, seconds=[one for one in test_kills.SECONDS if one != JOINS_IN_CI]),
        *again(HAND_OVER, point=["sending_state"], rank=[None]),
        *again(HAND_OVER, point=["receiving_state"], rank=[3]),
        *slow(TO_ONE_BEHIND, point=["sending_state"], step=[22]),
        *slow(TO_ONE_BEHIND, point=["receiving_state"], step=[21]),
        *again(test_notice.test_no_step_is_made_again_and_it_is_one_planned_end_as_a_leave_is),
        *again(test_collective_read.test_damage_in_one_share_sends_all_to_the_checkpoint_before),
        *slow(
            test_collective_read.test_killed_as_it_begins_and_when_its_share_is_read,
            point=["restoring", "sharing"],
        ),
        *slow(test_worker_checkpointer.test_killed_as_the_state_is_copied),
    ],
)
def test_other_files_on_a_device(rerun, request):
    rerun(request)
