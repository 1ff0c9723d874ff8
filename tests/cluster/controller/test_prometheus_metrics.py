"""The metrics of a run: their values, their labels, and their table in the documentation."""

import math

import pytest

from elastic_dp.cluster.controller.prometheus_metrics import PrometheusMetrics
from elastic_dp.coordinator.messages import AbortGeneration
from elastic_dp.telemetry.goodput import Goodput
from elastic_dp.telemetry.journal import Journal
from elastic_dp.telemetry.phase_clock import PhaseTimes

STATUS = {
    "phase": "running",
    "step": 10,
    "world_size": 2,
    "size": 3,
    "generation": 1,
    "metrics": {"loss": 0.5, "name": "x"},
    "rows_per_s": 16.0,
    "led_s": 10.0,
    "newest_checkpoint": None,
    "workers": {"w1": "member", "w2": "member", "w3": "starting"},
}


class Sink:
    def __init__(self):
        self.values, self.observed = {}, []

    def put(self, kind, value, label):
        assert (label in kind.values) if kind.label else not label, (kind.name, label)
        if kind.bounds:
            self.observed.append((kind.name, label, value))
        else:
            self.values[kind.name.removeprefix("elastic_dp_"), label] = value


@pytest.fixture
def journal():
    return Journal(None)


@pytest.fixture
def metrics(journal):
    return PrometheusMetrics(journal, stored=True)


NOTHING, NO_TIMES = Goodput(), PhaseTimes()


def sample(exported, now, sink=None, times=NO_TIMES, goodput=NOTHING, **status):
    sink = Sink() if sink is None else sink
    exported.sample(now, STATUS | status, goodput, times, {"controller": 7, "workers": 4}, sink.put)
    return sink


def test_metrics_say_step_loss_workers_and_goodput(metrics):
    values = sample(metrics, 110.0, goodput=Goodput(useful=3.0, pause=1.0)).values
    for name, value in {
        ("running", ""): 1.0,
        ("step", ""): 10,
        ("loss", ""): 0.5,
        ("world_size", ""): 2,
        ("wanted_workers", ""): 3,
        ("generation", ""): 1,
        ("workers", "member"): 2,
        ("workers", "starting"): 1,
        ("workers", "evicted"): 0,
        ("goodput_seconds", "useful"): 3.0,
        ("goodput_seconds", "redone"): 0.0,
        ("rows_per_second", ""): 16.0,
        ("checkpoint_age_seconds", ""): 10.0,
        ("store_retries", "controller"): 7,
        ("store_retries", "workers"): 4,
    }.items():
        assert values[name] == value, name


def test_parts_of_a_step_are_those_since_the_last_sample(metrics):
    sample(metrics, 110.0)
    spent = PhaseTimes(data=2.0, compute=12.0, collective=4.0, other=1.0, checkpoint=1.0)
    values = sample(metrics, 120.0, times=spent, step=30).values  # two workers, 10 s each
    parts = {part: values["step_part_seconds", part] for part in ("data", "compute", "checkpoint")}
    assert parts == pytest.approx({"data": 0.05, "compute": 0.3, "checkpoint": 0.025})
    assert sum(v for (n, _), v in values.items() if n == "step_part_seconds") == pytest.approx(0.5)


def test_pause_is_observed_once_with_its_cause_and_the_start_is_none(metrics, journal):
    sink = Sink()
    sample(metrics, 110.0, sink, PhaseTimes(pause=4.0))
    journal.command(AbortGeneration("w1", 1))
    sample(metrics, 112.0, sink, PhaseTimes(pause=4.4), phase="forming", generation=2)
    for now in (114.0, 116.0):
        sample(metrics, now, sink, PhaseTimes(pause=5.0), generation=2)
    sample(metrics, 118.0, sink, PhaseTimes(pause=5.2), generation=3)
    [first, second] = sink.observed
    assert first == ("elastic_dp_pause_seconds", "loss", pytest.approx(0.5))
    assert second == ("elastic_dp_pause_seconds", "planned", pytest.approx(0.1))


def test_checkpoint_age_and_duration_are_those_of_the_newest(metrics):
    newest = {"step": 9, "age_s": 4.0, "duration_s": 3.0}
    values = sample(metrics, 140.0, newest_checkpoint=newest).values
    assert values["checkpoint_age_seconds", ""] == 4.0
    assert values["checkpoint_duration_seconds", ""] == 3.0


def test_loss_that_is_not_finite_or_no_number_is_left_out(metrics):
    for loss in (math.nan, "0.5", None):
        assert ("loss", "") not in sample(metrics, 110.0, metrics={"loss": loss}).values
