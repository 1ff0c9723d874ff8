"""Goodput: its categories add up, and agree with what is counted in another way."""

from dataclasses import asdict, fields, replace
from itertools import pairwise, takewhile
from math import inf, nan

import pytest

from elastic_dp.coordinator import messages as m
from elastic_dp.telemetry.goodput import Goodput, GoodputMeter, goodput_of
from elastic_dp.telemetry.phase_clock import PhaseClock, PhaseTimes
from tests.simulation.sim_controller import SimController
from tests.simulation.workers import SimWorker
from tests.simulation.world import World

REPORT_S = 10.0


class TimedWorker(SimWorker):
    """A simulated worker with the clock of a real one."""

    def __init__(self, world, worker_id):
        self.clock = PhaseClock()
        super().__init__(world, worker_id)

    @property
    def phase(self):
        return self._phase

    @phase.setter
    def phase(self, phase):
        self.clock.enter(phase, self.world.now)
        self._phase = phase

    def send(self, event):
        if isinstance(event, m.HeartbeatReceived):
            event = replace(event, times=self.clock.times(self.world.now))
        super().send(event)


class RecordedWorld(World):
    """Writes the journal that the controller would write."""

    def __init__(self, seed):
        super().__init__(seed, worker_class=TimedWorker)
        self.lines, self.newest, self.told = [], {}, 0.0
        self.lost, self.step = set(), 0

    def line(self, kind, name, **more):
        self.lines.append({"time": self.now, kind: name} | more)

    def new_controller(self, recovering):
        self.line("event", "ControllerStarted", size=self.size, takes_over=recovering)
        super().new_controller(recovering)

    def flush(self, times):
        if times:
            self.line("event", "TimesReported", step=self.step, times=dict(times))

    def heard(self, event):
        if isinstance(event, m.HeartbeatReceived):
            self.newest[event.worker] = event.times
            self.step = max(self.step, event.step)
            if self.now >= self.told + REPORT_S:
                self.flush(self.newest)
                self.newest, self.told = {}, self.now
        elif not isinstance(event, m.DeadlineReached):
            if isinstance(event, m.WorkerLost):
                if event.worker in self.lost:
                    return
                self.lost.add(event.worker)
                self.flush({w: t for w, t in self.newest.items() if w == event.worker})
            self.line("event", type(event).__name__, **named(event))
            if isinstance(event, m.CheckpointFound):
                self.step = min(self.step, event.step or 0)

    def execute(self, command, by):
        if by is self.controllers[-1]:
            if isinstance(command, m.FinishRun | m.FailRun):
                self.flush(self.newest)
            self.line("command", type(command).__name__, **named(command))
        super().execute(command, by)


def named(message):
    values = {field.name: getattr(message, field.name) for field in fields(message)}
    if (membership := values.pop("membership", None)) is not None:
        values["members"] = [member.worker for member in membership.members]
    return values


@pytest.fixture
def recorded(monkeypatch):
    process = SimController.process

    def hears(self, event):
        if self is self.world.controllers[-1]:
            self.world.heard(event)
        process(self, event)

    monkeypatch.setattr(SimController, "process", hears)

    def run(seed):
        world = RecordedWorld(seed)
        world.run()
        return world

    return run


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


def gains(lines):
    """(line, worker, times that its report adds), of workers that are there."""
    present, _ = spans(lines)
    before = dict.fromkeys(present, PhaseTimes())
    for line in lines:
        for worker, times in line.get("times", {}).items():
            begin, gone = present.get(worker, (inf, 0.0))
            if begin <= line["time"] <= gone and sum(times) > sum(before[worker]):
                yield line, worker, PhaseTimes(*times).plus(before[worker], -1)
                before[worker] = PhaseTimes(*times)


def counted_by_category(lines):
    """Goodput from the gains of all reports, each by what became of its step later, and from the
    time of each worker that no report covers."""
    present, _ = spans(lines)
    until_end = list(takewhile(lambda line: not is_end(line), lines))
    lost = {line["worker"] for line in until_end if line.get("event") == "WorkerLost"}
    told = {line["worker"] for line in lines if line.get("command") == "ReleaseWorker"}
    returns = [i for i, line in enumerate(lines) if line.get("event") == "CheckpointFound"]
    count = dict.fromkeys((field.name for field in fields(Goodput)), 0.0)
    silent = {worker: gone - begin for worker, (begin, gone) in present.items()}
    for line, worker, gain in gains(lines):
        at = next(i for i, each in enumerate(lines) if each is line)
        undone = any(i > at and line["step"] > (lines[i]["step"] or 0) for i in returns)
        count["redone" if undone else "useful"] += gain.compute + gain.collective + gain.other
        count["redone"] += gain.redone
        count["pause"] += gain.pause
        count["data_wait"] += gain.data
        count["checkpoint"] += gain.checkpoint
        silent[worker] -= sum(gain)
    for worker, seconds in silent.items():
        died = "pause" if worker in told else "redone"
        count[died if worker in lost else "useful"] += seconds
    count["waiting_for_workers"] = counted(lines)[1]
    return Goodput(**count)


@pytest.mark.parametrize("chunk", range(5))
def test_goodput_of_random_histories_adds_up_and_agrees_with_an_independent_count(chunk, recorded):
    for seed in range(10 * chunk, 10 * chunk + 10):
        world = recorded(seed)
        goodput = goodput_of(world.lines)
        total, _ = counted(world.lines)
        assert goodput.total == pytest.approx(total, rel=0.01), seed
        journal = asdict(counted_by_category(world.lines))
        for name, seconds in asdict(goodput).items():
            assert seconds >= 0, (seed, name)
            assert seconds == pytest.approx(journal[name], abs=0.01 * total), (seed, name)


def test_goodput_is_the_same_from_any_cut_of_the_journal(recorded):
    lines = recorded(3).lines
    meter = GoodputMeter()
    for i, line in enumerate(lines):
        meter.line(line)
        assert meter.goodput() == goodput_of(lines[: i + 1])


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
    assert clock.times(now) == PhaseTimes(data=2, compute=4, collective=1, other=1, pause=1)
    for now, phase in [(16, "compute"), (18, "collective"), (21, "wait"), (22, "form")]:
        clock.enter(phase, now)
    assert clock.times(now) == PhaseTimes(2, 4, 1, 2, pause=2, redone=5)
