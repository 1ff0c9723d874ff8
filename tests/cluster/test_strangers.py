"""A run whose every port is flooded by strangers, while a worker dies and another joins, ends as if
there were none."""

import contextlib
import dataclasses
import multiprocessing
import resource
import secrets
import socket

import psutil
import pytest

from elastic_dp.config import MapStyleData
from elastic_dp.coordinator.messages import StopRequested
from elastic_dp.distributed import process_group
from elastic_dp.telemetry.journal import Journal
from elastic_dp.testing.process_worker_group import ProcessRun
from tests.cluster import strangers
from tests.patience import PATIENCE_S, eventually
from tests.runs import ENDLESS, Points, goes_on, group, local, losses_of, reached, spec_of, texts_of
from tests.train.jobs import average_and_plateau, plain


@pytest.fixture(autouse=True)
def _other_port():
    """Strangers may have taken pairs of Gloo's port in this process, which groups of later tests
    would wait for."""
    yield
    if process_group._gloo_device is not None:
        process_group._gloo_device.spent = True


def processes_of(run):
    """The controller's, the workers', and what these have started."""
    found = [psutil.Process()]
    for process in [*run.worker_group.processes.values()]:
        with contextlib.suppress(psutil.Error):  # it has ended since
            worker = psutil.Process(process.pid)
            found += [worker, *worker.children()]
    return found


def ports_of(processes):
    """{"tcp": …, "udp": …}: addresses at which one of these processes listens, or has a socket."""
    found = {"tcp": set(), "udp": set()}
    for process in processes:
        with contextlib.suppress(psutil.Error):
            for one in process.net_connections("inet4"):
                if one.type == socket.SOCK_DGRAM:
                    found["udp"].add(tuple(one.laddr))
                elif one.status == psutil.CONN_LISTEN:
                    found["tcp"].add(tuple(one.laddr))
    return {kind: sorted(ports) for kind, ports in found.items()}


def attack(run, connections, datagrams):
    assert not run.controller.ended.is_set(), run.controller.outcome
    ports = ports_of(processes_of(run))
    assert ports["udp"] and len(ports["tcp"]) >= 2, ports  # Gloo's of each worker
    assert all(host == "127.0.0.1" for host, _ in ports["tcp"] + ports["udp"]), ports
    asked = {
        **ports,
        "connections": connections,
        "datagrams": datagrams,
        "nonce": run.controller.heartbeats.address.nonce.hex(),
        "secret": secrets.token_bytes(32).hex(),
        "seed": 1,
    }
    process = multiprocessing.get_context("forkserver").Process(target=strangers.send, args=[asked])
    process.start()
    return process


def wait_for(process):
    process.join(4 * PATIENCE_S)
    assert process.exitcode == 0


def test_secret_of_a_run_is_written_nowhere(tmp_path, capfd):
    """Not to its folder, an event, an argument list, a name or what is printed of its parts."""
    looked = tmp_path / "looked"
    spec = spec_of(steps=4, workers=2, config={"hold": {1: 2}, "gates": {2: str(looked)}})
    journal = Journal(str(tmp_path))
    with ProcessRun(spec, plain, journal=journal, url=str(tmp_path)) as run:
        eventually(lambda: reached(run, 2), run.controller.status)
        told = [str(process.cmdline()).encode() for process in processes_of(run)]
        looked.touch()
        assert run.wait(PATIENCE_S).error is None
        told += [
            repr(x).encode() for x in (run.controller, run.worker_group._job, run.journal._kept)
        ]
    journal.close()
    told += [file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()]
    told += [text.encode() for text in capfd.readouterr()]
    secret = run.worker_group._job.secret
    assert len(secret) == 32 and len(told) > 10
    for form in (secret, secret.hex().encode(), repr(secret)[2:-1].encode()):
        assert not any(form in text for text in told)


@pytest.mark.parametrize(
    ("connections", "datagrams"),
    [(200, 8_000), pytest.param(10_000, 1_000_000, marks=pytest.mark.slow)],
)
def test_run_under_fire_ends_with_the_undisturbed_digest(connections, datagrams):
    """One wave while a worker dies and its replacement joins, so that groups form under fire; one
    at the new ports. All three train before, so that each has the state."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    connections = min(connections, descriptors // 4)  # each costs a worker one, in both waves

    def whole(status):
        return (status["phase"], status["world_size"]) == ("running", 3)

    def under_fire(run):
        eventually(lambda: whole(run.controller.status()), run.controller.status)
        first = attack(run, connections, datagrams // 2)
        goes_on(run)
        next(iter(run.worker_group.processes.values())).kill()
        wait_for(first)
        goes_on(run)
        wait_for(attack(run, connections, datagrams // 2))
        goes_on(run)

    config = {"eval": MapStyleData(Points(60), micro_batch_size=8), "body_s": 0.1}
    spec = spec_of(steps=ENDLESS, workers=3, config=config)
    script = [(3, under_fire), (3, StopRequested("enough"))]
    outcome, run = group(spec, average_and_plateau, script=script)
    assert outcome.workers_lost == 1, losses_of(run)
    calm = dataclasses.replace(spec, max_steps=outcome.step)
    assert outcome.digest == local(calm, average_and_plateau).digest
    assert run.controller.heartbeats.refused > datagrams // 20
    assert any("They are ignored" in text for text in texts_of(run))
