"""Heartbeats of a slow worker, to the journal, the report and the requests to replace it."""

import time

from elastic_dp.cluster.controller.slow_worker_watch import SlowWorkerWatch
from elastic_dp.coordinator.messages import HeartbeatReceived, Member, Membership, TrainingPosition
from elastic_dp.report.report_builder import ReportBuilder
from elastic_dp.telemetry.journal import Journal

WORKERS = ("w1", "w2", "w3")


def test_slow_worker_is_recorded_and_reported_until_it_is_gone(monkeypatch):
    journal, posted, now = Journal(None), [], [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    watch = SlowWorkerWatch(journal, 200.0, posted.append)
    at = TrainingPosition(0)
    members = [Member(w, ((i, i + 1),), at, True) for i, w in enumerate(WORKERS)]
    group = Membership(1, (*members, Member("w4", (), at, False)), "w1", 1.0)  # w4 joins gradually

    def train(seconds):
        for _ in range(seconds):
            now[0] += 1.0
            for worker in (*WORKERS, "w4"):
                step, data = int(now[0]), now[0] * (0.5 if worker == "w2" else 0.1)
                times = (data, now[0] * 0.3, now[0] - data)
                heard = HeartbeatReceived(worker, 1, step, "compute", times=times)
                watch.heard(heard, group)

    train(60)
    watch.lost("w9")  # of no group
    train(100)
    [one] = watch.found
    assert (one.worker, one.phase, posted) == ("w2", "data", [])
    train(140)
    assert [event.worker for event in posted] == ["w2", "w2"]
    lines = journal.since(None, 0)[1]
    assert len(lines) == 1, "only what changes is recorded"
    builder = ReportBuilder("run")
    builder.line(lines[0])
    assert builder.build(time.time()).slow == [one]
    builder.line({"time": time.time(), "event": "ControllerStarted", "size": 3, "takes_over": True})
    assert not builder.build(time.time()).slow, "a controller that takes over knows nobody yet"
    watch.lost("w2")
    train(100)
    assert watch.found == () and journal.since(None, 0)[1][-1]["workers"] == ()
