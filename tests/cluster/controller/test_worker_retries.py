"""Requests to stores that workers retried, from their heartbeats to the controller's sum."""

from elastic_dp.cluster.controller.run_times import RunTimes
from elastic_dp.coordinator.messages import HeartbeatReceived
from elastic_dp.telemetry.journal import Journal


def beat(worker, retries):
    return HeartbeatReceived(worker, 1, 1, "data", store_retries=retries)


def test_sum_is_that_of_the_newest_count_of_each_worker_also_of_one_that_is_gone():
    times = RunTimes(Journal(None))
    for event in (beat("w1", 3), beat("w2", 1), beat("w1", 5), beat("w1", 4), beat("w3", 0)):
        times.heard(event)
    assert times.retries.total == 6
