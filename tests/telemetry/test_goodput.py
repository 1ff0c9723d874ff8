"""Goodput: its categories add up, and agree with what is counted in another way."""

from itertools import pairwise
from math import inf, nan

import pytest

from elastic_dp.telemetry.goodput import goodput_of
from elastic_dp.telemetry.phase_clock import PhaseClock, PhaseTimes


def spans(lines):
    """worker -> (named a member for the first time, gone), and the time of the end."""
    begins, ends = {}, {}
    over = next((line["time"] for line in lines if is_end(line)), lines[-1]["time"])
    for line in lines:
        if line.get("command") == "FormGeneration":
            for worker in line["members"]:
                if worker not in ends:
                    begins.setdefault(worker, line["time"])
        elif line.get("event") == "WorkerLost":
            ends.setdefault(line["worker"], line["time"])
    return {w: (at, min(ends.get(w, over), over)) for w, at in begins.items()}, over


def is_end(line):
    return line.get("command") in ("FinishRun", "FailRun")


def counted(lines):
    """Worker-seconds wanted and missing, counted at the middle of each span between two lines."""
    present, over = spans(lines)
    sizes = [(line["time"], line["size"]) for line in lines if "size" in line]
    times = sorted({min(line["time"], over) for line in lines})
    total = missing = 0.0
    for begin, end in pairwise(times):
        middle = (begin + end) / 2
        here = sum(a <= middle < b for a, b in present.values())
        wanted = next(size for at, size in reversed(sizes) if at <= middle)
        total += max(wanted, here) * (end - begin)
        missing += max(0, wanted - here) * (end - begin)
    return total, missing


def line(time, kind, **more):
    return {"time": float(time), "event": kind} | more


def form(time, *members):
    return {"time": float(time), "command": "FormGeneration", "members": list(members)}


def test_worker_that_is_not_there_is_waited_for_and_one_that_dies_loses_what_it_did_not_report():
    lines = [
        line(0, "ControllerStarted", size=2, takes_over=False),
        form(10, "w1", "w2"),
        line(20, "TimesReported", step=4, times={"w1": (1, 6, 2, 0, 0, 1, 0)}),
        line(20, "TimesReported", step=4, times={"w2": (1, 6, 1, 0, 1, 1, 0)}),
        line(25, "WorkerLost", worker="w2"),
        {"time": 35.0, "command": "FinishRun"},
    ]
    goodput = goodput_of(lines)
    assert goodput.waiting_for_workers == 20 + 10
    assert goodput.redone == 5  # of w2, between its report and its death
    assert (goodput.pause, goodput.data_wait, goodput.checkpoint) == (2, 2, 1)
    assert goodput.useful == 8 + 7 + 15  # w1 reported nothing after 20 s, and saw the end
    assert goodput.total == 2 * 35


def test_steps_behind_the_checkpoint_from_which_a_run_goes_on_are_redone():
    lines = [
        line(0, "ControllerStarted", size=1, takes_over=False),
        form(0, "w1"),
        line(10, "TimesReported", step=10, times={"w1": (0, 10, 0, 0, 0, 0, 0)}),
        line(30, "TimesReported", step=30, times={"w1": (0, 30, 0, 0, 0, 0, 0)}),
        line(30, "WorkerLost", worker="w1"),
        line(30, "CheckpointFound", step=10),
    ]
    goodput = goodput_of(lines)
    assert (goodput.useful, goodput.redone) == (10, 20)


def test_evaluation_after_the_step_of_the_checkpoint_is_not_redone():
    lines = [
        line(0, "ControllerStarted", size=1, takes_over=False),
        form(0, "w1"),
        line(10, "TimesReported", step=10, times={"w1": (0, 10, 0, 0, 0, 0, 0)}),
        line(30, "TimesReported", step=10, times={"w1": (0, 10, 0, 20, 0, 0, 0)}),
        line(40, "TimesReported", step=20, times={"w1": (0, 20, 0, 20, 0, 0, 0)}),
        line(40, "WorkerLost", worker="w1"),
        line(40, "CheckpointFound", step=10),
    ]
    goodput = goodput_of(lines)
    assert (goodput.useful, goodput.redone) == (30, 10)


def test_time_between_two_runs_of_one_folder_is_in_no_category():
    lines = [
        line(0, "ControllerStarted", size=1, takes_over=False),
        form(0, "w1"),
        line(10, "TimesReported", step=10, times={"w1": (0, 10, 0, 0, 0, 0, 0)}),
        line(1000, "ControllerStarted", size=1, takes_over=False),
        form(1005, "w1"),
        line(1010, "TimesReported", step=12, times={"w1": (0, 4, 0, 0, 0, 1, 0)}),
    ]
    assert goodput_of(lines).total == 10 + 10


@pytest.mark.parametrize(
    "damage", [{"size": "x"}, {"size": None}, {"size": inf}, {"times": 3}, {"worker": []}]
)
def test_damaged_line_is_ignored(damage):
    for kind in ("ControllerStarted", "TimesReported", "WorkerLost", "SizeRequested"):
        assert goodput_of([line(1, kind, **damage)]).total == 0


@pytest.mark.parametrize("seconds", [nan, inf])
def test_times_that_are_no_numbers_are_ignored(seconds):
    lines = [
        line(0, "ControllerStarted", size=1, takes_over=False),
        form(0, "w1"),
        line(10, "TimesReported", step=4, times={"w1": (0, seconds, 0, 0, 0, 0, 0)}),
        line(10, "WorkerLost", worker="w1"),
    ]
    assert goodput_of(lines).redone == goodput_of(lines).total == 10


def test_undone_step_is_redone_and_a_committed_one_counts_for_its_parts():
    clock = PhaseClock()
    times = [(0, "start"), (5, "wait"), (6, "form"), (7, "compute"), (8, "data"), (10, "compute")]
    for now, phase in [*times, (13, "collective"), (14, "apply"), (15, "body")]:
        clock.enter(phase, now)
    assert PhaseTimes.of(clock.state) == PhaseTimes(2, 4, 1, 1, pause=1)
    for now, phase in [(16, "compute"), (18, "collective"), (21, "wait"), (22, "form")]:
        clock.enter(phase, now)
    assert PhaseTimes.of(clock.state) == PhaseTimes(2, 4, 1, 2, pause=2, redone=5)
