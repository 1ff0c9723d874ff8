"""Connecting the devices of a generation: in time, with everybody, and again after a failure."""

import contextlib
import threading
import types
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType

from elastic_dp.device import nccl_communicator
from elastic_dp.distributed import device_connection
from elastic_dp.distributed.device_connection import DeviceConnection, load_kernels
from elastic_dp.errors import FormingFailed, GroupAborted
from tests.distributed.hanging_device import Keys, Locking, NeverConnects, OfHanging, connection
from tests.patience import PATIENCE_S, eventually

CPU = torch.device("cpu")
OTHER = {"connecting/1": "1"}  # has begun to connect


def test_connecting_says_that_members_are_missing():
    late = connection(OfHanging(), Keys({"connecting/2": "1"}), timeout_s=0.05, world_size=4)
    said = eventually(late.failure)
    assert said == "not all members began to connect their devices within 0.05 s"
    late.check()  # the generation goes on


@pytest.mark.parametrize("ends_by", ["abort", "time"])
def test_connecting_ends_by_an_abort_and_after_its_time(ends_by):
    never = NeverConnects()
    one = connection(OfHanging(never), Keys(OTHER), timeout_s=1.0)  # long enough to begin
    assert never.connecting.wait(PATIENCE_S)
    if ends_by == "time":
        assert eventually(one.failure) == "connecting the devices takes more than 1 s"
        assert not never.aborting.is_set()  # that the members must agree on
    one.abort()
    assert never.aborting.wait(PATIENCE_S)
    assert (one.communicator, one.failure()) == (None, None)


def connecting_threads():
    return [thread for thread in threading.enumerate() if thread.name == "connecting"]


@pytest.mark.parametrize("pause_s", [0.0, PATIENCE_S])
def test_connecting_ends_by_an_abort_while_it_waits(pause_s):
    """For others, or for its begin."""
    one = DeviceConnection(
        OfHanging(), Keys, rank=0, world_size=2, timeout_s=PATIENCE_S, pause_s=pause_s
    ).start()
    one.abort()
    eventually(lambda: not connecting_threads())


def fails(check):
    raise RuntimeError("no route to a peer")


@pytest.mark.parametrize(
    "afterwards", [lambda check: check(), lambda check: None, fails], ids=["asks", "late", "fails"]
)
def test_connecting_that_blocks_an_abort_ends_no_process(afterwards, monkeypatch):
    """A peer is lost while NCCL connects: its members go on, and nobody waits for the library. What
    it does afterwards, also without asking whether the attempt goes on, changes nothing."""
    monkeypatch.setattr(device_connection, "ABORT_LIMIT_S", 0.05)
    exited, locking = threading.Event(), Locking(afterwards)
    monkeypatch.setattr(device_connection.os, "_exit", lambda code: exited.set())
    accelerator = OfHanging(locking)
    locking.may_end.clear()
    one = connection(accelerator, Keys(OTHER))
    assert locking.connecting.wait(PATIENCE_S)
    one.abort()
    assert not exited.wait(0.2)
    locking.may_end.set()
    assert locking.aborting.wait(PATIENCE_S)
    eventually(lambda: not connecting_threads())
    assert (one.communicator, one.failure()) == (None, None)


def test_communicator_that_was_aborted_is_destroyed_with_its_connection(monkeypatch):
    """To destroy one blocks, and whoever aborts must not wait."""
    monkeypatch.setattr(device_connection, "abort_in_background", lambda abort: abort())
    accelerator = OfHanging()
    held = [connection(accelerator, Keys(OTHER))]
    eventually(lambda: held[0].communicator)
    made = weakref.ref(accelerator.made)
    del accelerator.made
    held[0].abort()
    held[0].abort()
    eventually(lambda: not connecting_threads())
    assert made() is not None
    held.clear()
    assert made() is None


@pytest.mark.parametrize("error", [RuntimeError("no interface"), dist.DistBackendError("NCCL")])
def test_connecting_that_fails_ends_no_generation(error):
    """The group makes steps without the communicator."""
    accelerator = OfHanging()
    accelerator.made.connect = lambda check: (_ for _ in ()).throw(error)
    one = connection(accelerator, Keys(OTHER))
    assert eventually(one.failure) == f"connecting the devices failed: {error}"
    one.check()
    assert accelerator.made.aborting.wait(PATIENCE_S)


def test_connecting_broken_device_is_raised_at_once():
    accelerator = OfHanging()

    def fails(check):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    accelerator.made.connect = fails
    one = connection(accelerator, Keys(OTHER))
    eventually(lambda: one._fault)
    with pytest.raises(FormingFailed):
        one.check()


def test_pauses_before_attempts_grow_up_to_a_limit():
    pauses = [device_connection.pause_before(attempt) for attempt in range(8)]
    assert pauses == [0.0, 30.0, 60.0, 120.0, 240.0, 480.0, 600.0, 600.0]


@pytest.mark.parametrize("launch_limit_s", [PATIENCE_S, 0.01])
def test_abort_waits_for_a_launch_and_none_begins_after_it(launch_limit_s, monkeypatch):
    """NCCL frees the communicator, whose address the launch has. But a launch that finds no room
    on a device that spins ends by the abort only."""
    monkeypatch.setattr(device_connection, "_LAUNCH_LIMIT_S", launch_limit_s)
    one = connection(OfHanging(), Keys(OTHER))
    eventually(lambda: one.communicator)
    with one.in_use() as communicator:
        one.abort()
        waits = launch_limit_s == PATIENCE_S
        assert communicator.aborting.wait(0.1 if waits else PATIENCE_S) != waits
    assert communicator.aborting.wait(PATIENCE_S)
    with pytest.raises(GroupAborted), one.in_use():
        pass


def test_nccl_is_made_without_blocking_and_with_the_ranks_of_its_group(monkeypatch):
    made = {}

    def nccl(store, rank, size, options):
        made.update(rank=rank, size=size, options=options)

    nccl.Options = lambda: types.SimpleNamespace(config=types.SimpleNamespace())
    monkeypatch.setattr(dist, "ProcessGroupNCCL", nccl, raising=False)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.delenv(nccl_communicator._CONNECTING_LIMIT, raising=False)
    device = torch.device("cuda", 0)
    nccl_communicator.NcclCommunicator("store", 1, 3, device, 20.4)
    options = made.pop("options")
    assert made == {"rank": 1, "size": 3}
    assert options.global_ranks_in_group == [0, 1, 2]
    assert options.config.blocking == 0
    assert options._timeout == timedelta(hours=24)  # a peer may be in a long loop body
    assert nccl_communicator.os.environ[nccl_communicator._CONNECTING_LIMIT] == "20"


def test_nccl_connects_for_each_kind_of_collective_before_a_step_uses_it(monkeypatch):
    """Each connects peers when it is first launched, and a peer may be gone by then. It is
    connected when the device has done all of them."""
    launched, checks, passed = [], [], [True, False, False]

    class Launched:
        def __getattr__(self, name):
            return lambda *given: launched.append((name, given)) or self

        def query(self):
            return passed.pop()

    made = nccl_communicator.NcclCommunicator.__new__(nccl_communicator.NcclCommunicator)
    made._backend, made._device, made._world_size = Launched(), CPU, 3
    monkeypatch.setattr(nccl_communicator, "torch", types.SimpleNamespace(**vars(torch)))
    nccl_communicator.torch.cuda = types.SimpleNamespace(
        set_device=lambda device: None,
        Stream=lambda device: None,
        stream=lambda stream: contextlib.nullcontext(),
        Event=Launched,
    )
    made.connect(lambda: checks.append(None))
    assert len(checks) == 2
    kinds = [name for name, _ in launched if name not in ("wait", "record")]
    assert kinds == ["alltoall_base", "_allgather_base", "allreduce"]
    assert launched[0][1][2:4] == ([1, 1, 1], [1, 1, 1])  # with every peer


def test_nccl_error_that_torch_reports_is_a_failure_of_the_communicator():
    made = nccl_communicator.NcclCommunicator.__new__(nccl_communicator.NcclCommunicator)
    reported = [ErrorType.SUCCESS, ErrorType.COMM_ERROR]
    made._backend = types.SimpleNamespace(get_error=lambda: reported.pop(0))
    assert [made.failure(), made.failure()] == [None, "NCCL reports COMM_ERROR"]


def test_kernels_are_loaded_by_a_communicator_of_one_rank_which_is_then_aborted():
    accelerator, sizes = OfHanging(), []

    def communicator(store, rank, world_size, timeout_s):
        sizes.append(world_size)
        return accelerator.made

    accelerator.communicator = communicator
    loading = load_kernels(accelerator)
    assert accelerator.made.aborting.wait(PATIENCE_S)
    assert sizes == [1] and loading.communicator is None
