"""A snapshot of a device's state: only its readers wait for it. The device is simulated: what it
copies arrives when it is waited for."""

import contextlib
import dataclasses
import threading
import time
import types

import pytest
import torch

from elastic_dp.checkpoint import layout
from elastic_dp.checkpoint import snapshot as snapshots
from elastic_dp.checkpoint.catalog import Catalog
from elastic_dp.checkpoint.checkpoint_reader import load_newest
from elastic_dp.checkpoint.checkpoint_writer import write_commit
from elastic_dp.checkpoint.commit_record import CommitMetadata
from elastic_dp.checkpoint.layout import TensorSpec
from elastic_dp.checkpoint.snapshot import HeldPiece, HeldState, Snapshot, SnapshotMemory
from elastic_dp.checkpoint.uploader import Uploader
from elastic_dp.config import CheckpointConfig
from elastic_dp.device import host_copies
from elastic_dp.device.host_copies import HostCopies, host_memory
from elastic_dp.errors import ClusterError
from tests.checkpoint.states import big_tree, memory_store, same
from tests.patience import PATIENCE_S, eventually
from tests.runs import local, spec_of
from tests.train.jobs import adamw, classifier, cross_entropy, plain

DEVICE = torch.device("cuda", 0)


class Log:
    """What is asked of the fakes below, in order."""

    def __init__(self, monkeypatch):
        self.calls = calls = []

        class Stream:
            def __init__(self, device=None):
                self.name = "side"

            def __getattr__(self, name):
                return lambda *args: calls.append((self.name, name))

        class Event:
            def __init__(self, **options):
                pass

            def record(self, stream):
                calls.append((stream.name, "record"))

            def synchronize(self):
                calls.append(("event", "synchronize"))

            def elapsed_time(self, other):
                return 250.0

        @contextlib.contextmanager
        def stream(entered):
            calls.append((entered.name, "enter"))
            yield

        current = Stream()
        current.name = "current"
        forbidden = lambda *_: pytest.fail("the host waits for the device")  # noqa: E731
        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "stream", stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
        monkeypatch.setattr(torch.cuda, "synchronize", forbidden)
        copy = lambda *_, non_blocking=False: calls.append(("copy", non_blocking))  # noqa: E731
        monkeypatch.setattr(torch, "_foreach_copy_", copy)


def test_copy_from_a_device_orders_streams_and_does_not_wait(monkeypatch):
    log, copies = Log(monkeypatch), HostCopies()
    copies.copy([torch.empty(3)], [types.SimpleNamespace(device=DEVICE)])
    assert log.calls == [
        ("side", "wait_stream"),
        ("side", "enter"),
        ("side", "record"),
        ("copy", True),
        ("side", "record"),
        ("current", "wait_event"),
    ]
    copies.wait()
    assert log.calls[-1] == ("event", "synchronize") and copies.copied_s == 0.25


@pytest.mark.parametrize("code", [0, 1])
def test_register_gives_the_driver_exactly_the_memory_and_takes_back_what_it_took(
    code, monkeypatch
):
    calls = []
    cudart = types.SimpleNamespace(
        cudaHostRegister=lambda *args: calls.append(args) or code,
        cudaHostUnregister=lambda address: calls.append(address) or 0,
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    copies, memory = HostCopies(), torch.empty(5 << 12, dtype=torch.uint8)
    copies.register(memory)
    copies.unregister()
    copies.unregister()
    registered = (memory.data_ptr(), 5 << 12, 1)
    assert calls == ([registered, memory.data_ptr()] if code == 0 else [registered])


def test_half_of_the_memory_of_the_container_is_registered_at_most(tmp_path, monkeypatch):
    cudart = types.SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda _: 0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    (tmp_path / "memory.max").write_text(f"{10 << 12}\n")
    monkeypatch.setattr(host_copies, "host_memory", lambda of=host_memory: of(str(tmp_path)))
    copies = HostCopies()
    for piece in torch.empty(8 << 12, dtype=torch.uint8).split(2 << 12):
        copies.register(piece)
    assert copies.registered_bytes == 4 << 12
    (tmp_path / "memory.max").write_text("max\n")  # no limit: the host's
    assert host_memory(str(tmp_path)) > 10 << 12


def test_memory_is_taken_from_the_driver_when_the_copies_into_it_have_arrived(monkeypatch):
    log, copies = Log(monkeypatch), HostCopies()
    cudart = types.SimpleNamespace(
        cudaHostRegister=lambda *_: 0,
        cudaHostUnregister=lambda _: log.calls.append(("driver", "unregister")),
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    memory = torch.empty(3)
    copies.register(memory)
    copies.copy([memory], [types.SimpleNamespace(device=DEVICE)])
    copies.unregister()
    assert log.calls[-2:] == [("event", "synchronize"), ("driver", "unregister")]


class LateCopies(HostCopies):
    """Copies of a device: what is copied is there once it was waited for."""

    def __init__(self):
        super().__init__()
        self.launched, self.registered, self.threads = [], [], []

    def copy(self, targets, sources):
        for target in targets:
            target.zero_()
        self.launched = [(t, s.clone()) for t, s in zip(targets, sources, strict=True)]

    def wait(self):
        for target, source in self.launched:
            target.copy_(source)
        self.launched = []

    def register(self, memory):
        self.threads.append(threading.current_thread())
        self.registered.append((memory.data_ptr(), memory.numel()))

    def unregister(self):
        self.registered.clear()


@pytest.fixture
def on_device(monkeypatch):
    """All tensors count as a device's."""
    of = TensorSpec.of.__func__

    def device_spec(cls, name, tensor):
        spec = of(cls, name, tensor)
        object.__setattr__(spec, "device", "cuda")
        return spec

    monkeypatch.setattr(TensorSpec, "of", classmethod(device_spec))


def test_a_snapshot_of_a_device_is_read_when_its_copies_have_arrived(on_device):
    copies, tree = LateCopies(), big_tree(1 << 20)
    snapshot = Snapshot(copies)
    snapshot.take(1, tree)
    assert copies.launched, "take waited for the copies"
    expected = Snapshot()
    expected.take(1, tree)
    tree["whole"].add_(1)  # the next step
    assert snapshot.manifest() == expected.manifest()


def test_pieces_of_a_device_are_read_when_their_copies_have_arrived(on_device):
    def held(state):
        return HeldState(1, [HeldPiece(0, 0, 64, state, ("w0",), shape=(8, 8), stride=(8, 1))])

    state = {"exp_avg": torch.arange(64.0), "step": torch.tensor(3.0)}
    snapshot, expected = Snapshot(copies := LateCopies()), Snapshot()
    snapshot.take(1, {}, held(state))
    assert copies.launched, "take waited for the copies"
    expected.take(1, {}, held(state))
    state["exp_avg"].add_(1)  # the next step
    assert snapshot.manifest() == expected.manifest()
    snapshot.memory.make_ready()
    assert copies.registered == [(snapshot.memory.content.data_ptr(), 4096)]


def test_the_memory_of_snapshots_is_registered_once_in_the_background(on_device):
    shares = []
    uploader = Uploader(Catalog(memory_store()), shares.append)
    uploader.snapshot = Snapshot(copies := LateCopies())
    tree = big_tree(1 << 20)
    for step in (1, 2):
        uploader.take(step, tree, writer="w1", members=["w1"])
        uploader.wait()
    memory = uploader.snapshot.memory.content
    eventually(lambda: copies.registered)
    assert copies.registered == [(memory.data_ptr(), memory.nbytes)]
    assert threading.current_thread() not in copies.threads
    tree["more"] = torch.zeros(1 << 20)
    uploader.take(3, tree, writer="w1", members=["w1"])  # needs other memory
    uploader.wait()
    eventually(lambda: len(copies.threads) == 2)
    assert copies.registered[0][0] == uploader.snapshot.memory.content.data_ptr()
    uploader.close()
    assert copies.registered == []
    write_commit(uploader._catalog, [shares[-1]], 1, CommitMetadata())
    _, loaded = load_newest(uploader._catalog, on_damage=pytest.fail)
    assert same(loaded, tree)


def test_no_copy_goes_to_two_pieces_of_memory_that_are_registered_apart(on_device, monkeypatch):
    monkeypatch.setattr(layout, "MAX_UNIT_BYTES", 2 << 12)  # in place of 8 MiB
    monkeypatch.setattr(snapshots, "PIECE_BYTES", 3 << 12)  # in place of 64 MiB
    tree, expected = big_tree(1 << 18), Snapshot()
    tree["turned"] = torch.randn(90, 110).t()
    snapshot = Snapshot(copies := LateCopies())
    snapshot.take(1, tree)
    begin = snapshot.memory.content.data_ptr()
    for target, _ in copies.launched:
        at = target.data_ptr() - begin
        assert at // (3 << 12) == (at + max(1, target.nbytes) - 1) // (3 << 12)
    monkeypatch.setattr(snapshots, "PIECE_BYTES", 1 << 30)
    expected.take(1, tree)
    held = [blob.units for blob in expected.manifest().blobs]
    assert [blob.units for blob in snapshot.manifest().blobs] == held
    snapshot.memory.make_ready()
    assert sum(nbytes for _, nbytes in copies.registered) == snapshot.memory.content.numel()
    assert max(nbytes for _, nbytes in copies.registered) == 3 << 12


class SlowToRegister(LateCopies):
    def register(self, memory):
        time.sleep(0.004)
        super().register(memory)


def test_registering_memory_rests_between_pieces_until_somebody_waits_for_it(
    on_device, monkeypatch
):
    """While a piece is registered a launch may wait, and a step has thousands of them."""
    monkeypatch.setattr(snapshots, "PIECE_BYTES", 1 << 12)
    snapshot = Snapshot(copies := SlowToRegister())
    snapshot.take(-1, {"x": torch.zeros(3 << 10)}, most_new=-1)
    begun_at = time.perf_counter()
    snapshot.memory.make_ready()
    assert len(copies.registered) >= 3
    assert time.perf_counter() - begun_at >= (len(copies.registered) - 1) * 19 * 0.004

    monkeypatch.setattr(snapshots, "REST", 1e6)
    uploader = Uploader(Catalog(memory_store()), lambda share: None)
    uploader.snapshot = Snapshot(copies := SlowToRegister())
    monkeypatch.setattr("elastic_dp.checkpoint.uploader.SOON_READY_BYTES", 0)
    uploader.prepare({"x": torch.zeros(3 << 10)})
    assert not uploader.ready()
    assert uploader.ready(must=True)
    assert len(copies.registered) >= 3
    uploader.close()


def test_state_that_is_larger_than_the_container_is_refused(monkeypatch):
    monkeypatch.setattr(snapshots, "host_memory", lambda: 1 << 20)
    snapshot = Snapshot()
    with pytest.raises(ClusterError, match=r"a checkpoint needs 0.0 GB .* container has 0.0 GB"):
        snapshot.take(-1, {"x": torch.zeros(1 << 20)}, most_new=-1)
    snapshot.take(1, {"x": torch.zeros(1 << 10)})


@pytest.mark.parametrize("is_used", [False, True])
def test_new_memory_is_written_before_a_snapshot_and_content_stays(is_used):
    """Writing has the system find the pages."""
    memory = SnapshotMemory(LateCopies())
    memory.make_room(3 << 12, on_device=False)
    if is_used:
        memory.use()
    memory.content.fill_(1)
    memory.make_ready()
    assert memory.content.eq(int(is_used)).all()


def test_memory_that_is_closed_is_not_made_ready(on_device):
    snapshot = Snapshot(copies := LateCopies())
    snapshot.take(-1, big_tree(1 << 18), most_new=-1)
    snapshot.memory.close()
    snapshot.memory.make_ready()
    assert copies.threads == []


def test_no_step_waits_for_the_memory_of_the_first_snapshot(tmp_path, monkeypatch):
    """However long the system takes to find it: the checkpoint is made later."""
    monkeypatch.setattr("elastic_dp.checkpoint.uploader.SOON_READY_BYTES", 0)
    found, taken = threading.Event(), []
    make_ready, take = SnapshotMemory.make_ready, Uploader.take

    def slow(self):
        assert found.wait(PATIENCE_S)
        make_ready(self)

    def takes(self, step, *rest, **named):
        taken.append(step)
        return take(self, step, *rest, **named)

    def train(ctx):
        model = classifier()
        for step in ctx.steps(model, adamw(model), cross_entropy):
            if step.number == 6:
                found.set()
                eventually(ctx._session.checkpoints._uploader._is_over)

    monkeypatch.setattr(SnapshotMemory, "make_ready", slow)
    monkeypatch.setattr(Uploader, "take", takes)
    spec = dataclasses.replace(spec_of(steps=12), checkpoint=CheckpointConfig(every_steps=2))
    local(spec, train, url=str(tmp_path / "run"))
    assert 6 <= taken[0] <= 10


def test_no_step_waits_for_the_memory_of_a_state_that_has_grown(tmp_path, monkeypatch):
    monkeypatch.setattr("elastic_dp.checkpoint.uploader.SOON_READY_BYTES", 1 << 20)
    found, taken = threading.Event(), []
    make_ready, take = SnapshotMemory.make_ready, Uploader.take
    held = {"x": torch.zeros(4)}

    def slow(self):
        if self.content.numel() > 1 << 20:
            assert found.wait(PATIENCE_S)
        make_ready(self)

    def takes(self, step, *rest, **named):
        is_taken = take(self, step, *rest, **named)
        taken.extend([step] if is_taken else [])
        return is_taken

    def train(ctx):
        model = classifier()
        holder = types.SimpleNamespace(state_dict=lambda: held, load_state_dict=held.update)
        for step in ctx.steps(model, adamw(model), cross_entropy, state={"held": holder}):
            if step.number == 3:
                held["x"] = torch.zeros(1 << 20)
            if step.number == 7:
                found.set()
                eventually(ctx._session.checkpoints._uploader._is_over)

    monkeypatch.setattr(SnapshotMemory, "make_ready", slow)
    monkeypatch.setattr(Uploader, "take", takes)
    spec = dataclasses.replace(spec_of(steps=14), checkpoint=CheckpointConfig(every_steps=1))
    local(spec, train, url=str(tmp_path / "run"))
    assert taken[0] <= 2 and not {3, 4, 5, 6} & {*taken} and {*range(7, 11)} & {*taken}


def test_snapshots_are_prepared_for_after_the_first_step(tmp_path, monkeypatch):
    """Then the optimizer has its state, and there is time until the first checkpoint."""
    calls = []
    prepare, take = Uploader.prepare, Uploader.take

    def prepares(self, *state):
        calls.append("prepare")
        prepare(self, *state)

    def takes(self, step, *rest, **named):
        calls.append(step)
        return take(self, step, *rest, **named)

    monkeypatch.setattr(Uploader, "prepare", prepares)
    monkeypatch.setattr(Uploader, "take", takes)
    spec = dataclasses.replace(spec_of(steps=4), checkpoint=CheckpointConfig(every_steps=3))
    local(spec, plain, url=str(tmp_path / "run"))
    assert calls[:2] == ["prepare", 3] and calls.count("prepare") == 1


def test_the_memory_of_snapshots_of_the_host_is_not_registered():
    snapshot = Snapshot(copies := LateCopies())
    snapshot.take(1, big_tree(1 << 16))
    snapshot.memory.make_ready()
    assert copies.registered == []
