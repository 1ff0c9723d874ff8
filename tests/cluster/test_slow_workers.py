"""Workers that are made slow, and what the run says of them."""

import contextlib
import json
import os
import re
import signal
import threading
import time

import pytest
import torch

from elastic_dp.config import FailureConfig, MapStyleData
from elastic_dp.coordinator.messages import WorkerLocation
from elastic_dp.report.report_builder import ReportBuilder
from elastic_dp.report.report_model import EventKind
from elastic_dp.report.run_status import Health, health_of, status_of_report
from elastic_dp.telemetry import slow_workers
from elastic_dp.testing.process_worker_group import ProcessRun
from tests.chaos.hosts import Network, available
from tests.patience import eventually
from tests.runs import ENDLESS, Points, lines_of, local, spec_of, texts_of


def is_mine(path):
    """Whether this process is the first that asks, which the file names."""
    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write(str(os.getpid()))
    except FileExistsError:
        with open(path, encoding="utf-8") as file:
            return file.read() == str(os.getpid())
    return True


class SlowDisk(Points):
    """Rows that take time in one process."""

    def __init__(self, path):
        super().__init__()
        self.path = path

    def __getitem__(self, i):
        if is_mine(self.path):
            time.sleep(0.01)
        return super().__getitem__(i)


def train(ctx):
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_fn(model, batch):
        until = time.process_time() + 0.004
        while time.process_time() < until:
            pass
        return torch.nn.functional.cross_entropy(model(batch["x"]), batch["y"])

    for _ in ctx.steps(model, optimizer, loss_fn):
        if (path := ctx.config.get("slow_body")) and is_mine(path):
            time.sleep(0.03)


@contextlib.contextmanager
def running(monkeypatch, train=train, hosts=None, **options):
    """A run of three workers that names slow ones within seconds. `hosts`: where it runs, if not on
    this machine."""
    for name, number in {"WINDOWS": 4, "FOUND": 4, "KEPT": 2}.items():
        monkeypatch.setattr(slow_workers, name, number)
    run = ProcessRun(
        spec_of(virtual=3, **options),
        train,
        location=lambda worker: WorkerLocation(f"node-of-{worker}"),
        **(hosts or {}),
    )
    run.controller.slow_workers.finder.window_s = 0.2
    with run:
        yield run


NODES = pytest.mark.skipif(not available(), reason="needs root and iproute2, to make hosts")


def wide(ctx):
    """Gradients of 4 MB."""
    model = torch.nn.Sequential(torch.nn.Linear(16, 1 << 16), torch.nn.Linear(1 << 16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loss = torch.nn.functional.cross_entropy
    for _ in ctx.steps(model, optimizer, lambda model, batch: loss(model(batch["x"]), batch["y"])):
        pass


@NODES
@pytest.mark.slow
@pytest.mark.parametrize("both_ways", [False, True])
def test_worker_with_a_slow_link_is_named_and_no_other(both_ways, monkeypatch):
    network = Network()
    hosts = [network.host() for _ in range(3)]

    def host_of(worker, node):
        return hosts[int(worker.removeprefix("w")) % 3]

    where = {"host_of": host_of, "address": network.address}
    with contextlib.closing(network), running(monkeypatch, wide, where, steps=ENDLESS) as run:
        status, host = run.controller.status, host_of("w2", 0)
        eventually(lambda: (status()["step"] > 40, status()["world_size"]) == (True, 3), status)
        assert not status()["slow"]
        host.slow("100mbit")
        if both_ways:
            host.slow("100mbit", incoming=True)
        eventually(lambda: status()["slow"], status)
        [one] = status()["slow"]
        assert (one["worker"], one["phase"]) == ("w2", "collective")
        host.heal()
        eventually(lambda: not status()["slow"], status)


def report_of(run):
    builder = ReportBuilder("run")
    for line in json.loads(json.dumps(lines_of(run))):
        builder.line(line)
    return builder.build(time.time())


def worker_of(run, path):
    pid = int(path.read_text())
    return next(worker for worker, one in run.worker_group.processes.items() if one.pid == pid)


def test_worker_with_slow_reads_is_named_with_its_node_phase_and_cost(tmp_path, monkeypatch):
    data = MapStyleData(SlowDisk(str(tmp_path / "slow")), micro_batch_size=4)
    with running(monkeypatch, steps=ENDLESS, data=data) as run:
        status = run.controller.status
        eventually(lambda: status()["slow"], status)
        live, report, worker = status(), report_of(run), worker_of(run, tmp_path / "slow")
        seen = status_of_report(report, time.time())
        for [one] in (live["slow"], seen["slow"], report.to_json()["slow"]):
            named = one["worker"], one["node"], one["phase"]
            assert named == (worker, f"node-of-{worker}", "data")
            # How much it costs: tests/telemetry. On a busy machine the rest takes longer, too.
            assert one["ratio"] > 2 and 0 < one["cost"] < 1 and one["step"] < live["step"]
        health, reason = health_of(live)
        text = (
            rf"{worker} on node node-of-{worker} is slow since \d\d:\d\d \(step \d+\): "
            r"data takes \d+\.\d times as long as with the others, which costs the run \d+ %"
        )
        assert health is Health.CONCERN and re.search(text, reason)
        assert re.search(text, report.verdict[2])
        assert re.search(text, next(e.text for e in report.events if e.kind is EventKind.SLOW))
        # It is withdrawn at once with the worker.
        run.worker_group.processes[worker].kill()
        eventually(lambda: not status()["slow"], status)
        assert not report_of(run).slow


def test_worker_that_gets_too_little_of_its_processor_is_named(monkeypatch):
    with running(monkeypatch, steps=ENDLESS) as run:
        status = run.controller.status
        eventually(lambda: status()["step"] > 5, status)
        worker, ended = "w2", threading.Event()
        pid = run.worker_group.processes[worker].pid

        def throttle():
            while not ended.wait(0.01):
                os.kill(pid, signal.SIGSTOP)
                time.sleep(0.04)
                os.kill(pid, signal.SIGCONT)

        thread = threading.Thread(target=throttle)
        thread.start()
        try:
            eventually(lambda: status()["slow"], status)
            [one] = status()["slow"]
            assert (one["worker"], one["phase"]) == (worker, "compute")
        finally:
            ended.set()
            thread.join()
        eventually(lambda: not status()["slow"], status)


@pytest.mark.slow
def test_slow_worker_is_replaced_and_the_weights_are_those_of_an_undisturbed_run(
    tmp_path, monkeypatch
):
    spec = {"steps": 250, "failure": FailureConfig(heartbeat_timeout_s=30.0, replace_slow=1.0)}
    options = spec | {"config": {"slow_body": str(tmp_path / "slow")}}
    with running(monkeypatch, **options) as run:
        outcome = run.wait()
    worker = losing = next(x for x in lines_of(run) if x.get("event") == "WorkerSlow")["worker"]
    order = [x.get("command") for x in lines_of(run) if x.get("worker") == losing]
    assert order.index("AvoidNode") < order.index("ReleaseWorker")
    assert f"{worker} is to be replaced: other takes" in "\n".join(texts_of(run))
    assert len([x for x in lines_of(run) if x.get("event") == "WorkerLost"]) == 4
    assert outcome.digest == local(spec_of(virtual=3, steps=250), train).digest
