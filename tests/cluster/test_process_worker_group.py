"""Plain processes as workers: what is sent to one that ends."""

import threading
from multiprocessing.connection import Connection

from elastic_dp.coordinator.messages import AbortGeneration
from elastic_dp.testing.process_worker_group import ProcessRun
from tests.patience import PATIENCE_S, eventually
from tests.runs import ENDLESS, spec_of
from tests.train.jobs import clipped_average_norm


def test_pipe_of_a_lost_worker_stays_open_while_a_command_is_written_to_it(monkeypatch):
    """Else it is written to a file that got the pipe's descriptor: once, to a lease of the run."""
    writes, lost, written = (threading.Event() for _ in range(3))
    send_bytes = Connection.send_bytes

    def slow_send_bytes(pipe, message):
        if lost_pipe[0] is pipe:
            writes.set()
            lost.wait(PATIENCE_S)
            open_then.append(not pipe.closed)
            written.set()
        send_bytes(pipe, message)

    lost_pipe, open_then = [None], []
    monkeypatch.setattr(Connection, "send_bytes", slow_send_bytes)
    with ProcessRun(spec_of(workers=2, steps=ENDLESS), clipped_average_norm) as run:
        eventually(lambda: run.controller.status()["world_size"] == 2, run.controller.status)
        worker, process = next(iter(run.worker_group.processes.items()))
        lost_pipe[0] = run.worker_group._pipes[worker]
        run.worker_group.send([worker], AbortGeneration(worker, 0))
        assert writes.wait(PATIENCE_S)
        process.kill()
        eventually(lambda: worker not in run.worker_group.processes, run.controller.status)
        lost.set()
        assert written.wait(PATIENCE_S)
    assert all(open_then)  # also that of an answer to a heartbeat
    eventually(lambda: lost_pipe[0].closed)
