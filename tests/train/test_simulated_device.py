"""Whole runs on a device with CUDA's semantics: the same digests as on the processor, whichever way
the gradients take, and one wait for the device in a step."""

from __future__ import annotations

import pytest
import torch

from elastic_dp.config import MapStyleData
from elastic_dp.distributed.device_transport import DeviceTransport
from elastic_dp.testing.simulated_device import SimulatedDevice
from elastic_dp.train.fault_injection import POINTS as POINTS_OF_FAULTS
from elastic_dp.train.fault_injection import WorkerFault
from elastic_dp.train.generations import generation_groups
from elastic_dp.train.local_run import LocalRun
from tests.patience import eventually
from tests.runs import Points, group, lines_of, local, spec_of
from tests.train import test_kills, test_notice
from tests.train.checkpointing import test_collective_read
from tests.train.jobs import average_and_plateau, batch_norm, in_small_buckets, plain


def transport(ctx) -> DeviceTransport | None:
    main = ctx._session._groups.main
    return None if main is None else main.on_device


def told_when_switched(train):
    """Writes the file ctx.config["switched"] in the first body after a step whose gradients the
    device's communicator has carried. Bodies wait until it stands."""

    def tells(ctx):
        session = ctx._session
        if not isinstance(session.link, LocalRun):
            begins = session._body_begins

            def body_begins(record):
                of_device = transport(ctx)
                if of_device is not None and session.world_size == ctx.config["size"]:
                    over = session.control._over
                    eventually(lambda: of_device.connected or over())
                    if of_device.switched:
                        with open(ctx.config["switched"], "w", encoding="utf-8") as file:
                            file.write("0")  # a fault may happen after it in any generation
                return begins(record)

            session._body_begins = body_begins
        train(ctx)

    return tells


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
    assert outcome.error is None, outcome.traceback
    assert outcome.digest == local(spec, train).digest
    assert (tmp_path / "switched").exists()


def waits_once(train):
    """Fails in a step that reads the device more than once before it is committed."""

    def counted(ctx):
        polls, reads, before = [0], [], [False]
        poll = DeviceTransport._poll

        def counting(self, event):
            polls[0] += 1
            poll(self, event)
            before[0] = False

        DeviceTransport._poll = counting
        for name in ("item", "__float__", "__bool__", "__int__"):
            setattr(
                torch.Tensor, name, told(getattr(torch.Tensor, name), name, reads, lambda: True)
            )
        torch.equal = told(torch.equal, "equal", reads, lambda: before[0])
        session = ctx._session
        commit = session.control.commit

        def at_commit():
            of_device = transport(ctx)
            if of_device is not None and of_device.switched and of_device.began_switched:
                assert (polls[0], reads) == (1, []), (polls, reads)
                ctx.config["counted"] += 1
            commit()

        opened = type(session).open

        def opens(self, *arguments):
            opened(self, *arguments)
            attempt = self.step_runner.attempt

            def attempts(step):
                polls[0], before[0] = 0, True
                reads.clear()
                of_device = transport(ctx)
                if of_device is not None:
                    of_device.began_switched = of_device.switched
                return attempt(step)

            self.step_runner.attempt = attempts

        type(session).open = opens
        session.control.commit = at_commit
        ctx.config["counted"] = 0
        train(ctx)
        assert ctx.config["counted"] >= 3

    return counted


def told(act, name, reads, when):
    def tell(*arguments, **options):
        if when():
            reads.append(name)
        return act(*arguments, **options)

    return tell


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
    outcome, _ = group(spec, told_when_switched(waits_once(train)), device=SimulatedDevice())
    assert outcome.error is None, outcome.traceback


POINTS = ("forward", "sent", "exchange", "gather", "header", "before_commit", "after_commit")


@pytest.mark.parametrize(
    "point", ["gather", *(pytest.param(p, marks=pytest.mark.slow) for p in POINTS if p != "gather")]
)
def test_kill_while_the_communicator_is_used_has_the_local_digest(point, tmp_path):
    """The survivors' device spins until their communicator is aborted. Then they go on."""
    spec = job(tmp_path, steps=30)
    before = (str(tmp_path / "switched"),)
    fault = WorkerFault(point, rank=1, world_size=3, once=str(tmp_path / "dead"), after=before)
    trained = told_when_switched(in_small_buckets(average_and_plateau))
    # The abort blocks after it has freed the device; nobody waits for that.
    outcome, _ = group(spec, trained, faults=(fault,), device=SimulatedDevice(abort_s=1.0))
    assert outcome.error is None, outcome.traceback
    assert (tmp_path / "dead").exists()
    assert outcome.workers_lost == 1
    assert outcome.digest == local(spec, average_and_plateau).digest


def loads_kernels(train):
    """Writes the file ctx.config["loaded"] where kernels are loaded before the worker joins."""

    def loading(ctx):
        load = generation_groups.load_kernels

        def loads(accelerator):
            assert ctx._session.generation == 0
            with open(ctx.config["loaded"], "a", encoding="utf-8") as file:
                file.write(f"{ctx._session.worker}\n")
            return load(accelerator)

        generation_groups.load_kernels = loads
        train(ctx)

    return loading


def test_joiner_loads_the_kernels_of_the_device_before_it_joins(tmp_path):
    """The source of the first generation does it while that connects."""
    spec = job(tmp_path, workers=2, steps=4)
    spec.config["loaded"] = str(tmp_path / "loaded")
    outcome, run = group(spec, loads_kernels(plain), device=SimulatedDevice())
    assert outcome.error is None, outcome.traceback
    loaded = (tmp_path / "loaded").read_text(encoding="utf-8").split()
    started = [x["worker"] for x in lines_of(run) if x.get("command") == "BeginTraining"]
    joiners = {x["worker"] for x in lines_of(run) if x.get("is_source") is False}
    assert set(loaded) == joiners < set(started)


@pytest.mark.slow
def test_worker_whose_communicator_reports_a_lost_peer_goes_on(tmp_path):
    """The worker leaves the generation by itself, before it is told to."""
    spec = job(tmp_path, steps=30)
    before = (str(tmp_path / "switched"),)
    fault = WorkerFault("gather", rank=1, world_size=3, once=str(tmp_path / "dead"), after=before)
    trained = told_when_switched(plain)
    outcome, _ = group(
        spec, trained, faults=(fault,), device=SimulatedDevice(reports_failures=True)
    )
    assert outcome.error is None, outcome.traceback
    assert outcome.workers_lost == 1
    assert outcome.digest == local(spec, plain).digest


def test_run_does_not_wait_for_devices_that_never_connect(tmp_path):
    """Also after a loss: the next generation begins without them, too."""
    spec = job(tmp_path, workers=2, steps=12)
    fault = WorkerFault("backward", 6, rank=1, once=str(tmp_path / "dead"))
    device = SimulatedDevice(connect_hangs=True)
    outcome, _ = group(spec, plain, faults=(fault,), device=device)
    assert outcome.error is None, outcome.traceback
    assert (outcome.digest, outcome.workers_lost) == (local(spec, plain).digest, 1)


# ------------------------------------------------- other files' tests, on the simulated device


@pytest.fixture
def _simulated(monkeypatch):
    monkeypatch.setenv("ELASTIC_DP_SIMULATED_DEVICE", "1")


@pytest.mark.slow
@pytest.mark.usefixtures("_simulated")
@pytest.mark.parametrize(
    "point",
    [
        p
        for p in POINTS_OF_FAULTS
        if p not in (*test_kills.WHILE_FORMING, *test_kills.WITH_CHECKPOINTS)
    ],
)
def test_kill_matrix_on_a_device_has_the_local_digest(point, tmp_path):
    test_kills.test_kill_at_each_point_has_the_local_digest(point, tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("_simulated")
@pytest.mark.parametrize("seconds", test_kills.SECONDS[-5:], ids=str)
def test_join_on_a_device_with_kills_has_the_local_digest(seconds, tmp_path):
    test_kills.test_killed_while_a_generation_forms(seconds, tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("_simulated")
def test_drain_on_a_device_makes_no_step_again(tmp_path):
    test_notice.test_no_step_is_made_again_and_it_is_one_planned_end_as_a_leave_is(tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("_simulated")
def test_restore_on_a_device_has_the_local_digest(tmp_path):
    calm = local(test_collective_read.spec_for(3), test_collective_read.wide)
    written, _ = group(
        test_collective_read.spec_for(2, steps=10),
        test_collective_read.wide,
        url=str(tmp_path / "run"),
    )
    assert written.error is None, written.traceback
    there = tmp_path / "run"
    test_collective_read.test_damage_in_one_share_sends_all_to_the_checkpoint_before(calm, there)
