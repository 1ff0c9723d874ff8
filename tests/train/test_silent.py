"""A node that is gone without a word: its worker and the process that sends its heartbeats stop at
once."""

import dataclasses
import os
import signal
import time

import psutil

from elastic_dp.coordinator.messages import StopRequested
from tests.patience import Stalls, eventually
from tests.runs import ENDLESS, PATIENT, goes_on, group, lines_of, local, spec_of
from tests.train.jobs import plain

TIMEOUT_S = 5.0
SPARE_S = 1.0  # a silent node is found this long after `heartbeat_timeout_s` at the latest


def silence(run, worker):
    """Stop a worker and its sidecar at once. Returns the seconds until the worker is evicted."""
    process = psutil.Process(run.worker_group.processes[worker].pid)
    sidecars = process.children()
    for one in (*sidecars, process):
        one.send_signal(signal.SIGSTOP)
    began = time.time()

    def evicted():
        lines = [line for line in lines_of(run) if line.get("command") == "EvictWorker"]
        return [line["time"] - began for line in lines if line["worker"] == worker]

    eventually(evicted, run.controller.status)
    for one in sidecars:
        os.kill(one.pid, signal.SIGKILL)
    return evicted()[0]


def test_a_silent_node_is_found_in_time_and_the_result_is_the_same():
    spec = dataclasses.replace(
        spec_of(steps=ENDLESS, config={"body_s": 0.1}, min_workers=2),
        failure=dataclasses.replace(PATIENT, heartbeat_timeout_s=TIMEOUT_S),
    )
    found = []

    def whole(status):
        return (status["phase"], status["world_size"]) == ("running", 3)

    def node_gone(run):
        eventually(lambda: whole(run.controller.status()), run.controller.status)
        members = run.controller.coordinator.membership.members
        with Stalls() as stalls:
            found.append(silence(run, members[-1].worker))
        found.append(stalls.lost_s)

    script = [(10, node_gone), (10, goes_on), (10, StopRequested("enough"))]
    outcome, _ = group(spec, plain, script=script)
    assert outcome.error is None, outcome.traceback
    assert outcome.digest == local(spec_of(steps=outcome.step), plain).digest
    found_s, lost_s = found
    assert TIMEOUT_S / 2 < found_s <= TIMEOUT_S + SPARE_S + lost_s
    assert outcome.workers_lost == 1
