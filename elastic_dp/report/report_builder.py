"""Builds the report of a run from the lines of its journal, one after the other.

The result depends on the lines and on the arguments of `build` alone. A line that another program
has damaged is ignored; what comes after it is not. Journals of runs in one process
(`fit(local=True)`) have few events, so checkpoints are also taken from the decisions.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from collections import deque
from collections.abc import Callable, Collection, Mapping
from typing import Any

from elastic_dp.report.metric_curves import MetricCurves
from elastic_dp.report.report_model import (
    CheckpointRow,
    Decision,
    EventKind,
    GroupSize,
    Report,
    RunEvent,
    RunPhase,
    WorkerCondition,
)
from elastic_dp.report.verdict import verdict
from elastic_dp.report.worker_histories import WorkerHistories
from elastic_dp.run_record import Result
from elastic_dp.telemetry.goodput import GoodputMeter
from elastic_dp.telemetry.slow_workers import SlowWorker
from elastic_dp.urls import redact_url
from elastic_dp.wording import counted, first_few

MOST_EVENTS = 5000
MOST_DECISIONS = 2000
MOST_CHECKPOINTS = 1000
MOST_CHARACTERS = 1000  # of one text
# A run that trains writes the times of its workers at least every ten seconds, and every 100
# seconds with 1000 workers.
SILENT_S = 60.0
SILENT_S_PER_WORKER = 0.3
_COMMITTED = re.compile(r"checkpoint of step (\d+) is committed")
_ENDS = re.compile(r"generation \d+ ends: (.*)", re.DOTALL)


class ReportBuilder:
    """Takes the lines of a journal, in their order, and builds a report at any time.

    `on_event` is called with each event when it is found.
    """

    def __init__(self, name: str, on_event: Callable[[RunEvent], object] | None = None) -> None:
        self._name = name
        self._on_event = on_event
        self._goodput = GoodputMeter()
        self._curves = MetricCurves()
        self._workers = WorkerHistories()
        self._group = _Group()
        self._log = _EventLog()
        self._checkpoints = _Checkpoints()
        self._slow: dict[str, SlowWorker] = {}
        self._began: float | None = None
        self._now = 0.0  # of the last line
        self._led_s = 0.0
        self._requested = 0  # the size
        self._limit: int | None = None  # what other runs of the cluster leave of it
        self._step = self._failures = 0
        self._starts = 0
        self._ended: tuple[RunPhase, str] | None = None

    def line(self, line: Mapping[str, Any]) -> None:
        """Take the next line of `events.jsonl` or `metrics.jsonl`."""
        with contextlib.suppress(LookupError, TypeError, ValueError, AttributeError, OverflowError):
            now = float(line["time"])
            if math.isfinite(now):
                self._take(now, line)

    def build(
        self,
        now: float,
        *,
        stored: Collection[int] = (),
        result: Result | None = None,
    ) -> Report:
        """Return the report at `now` (of `time.time`), or at the end of the run.

        `stored`: the steps whose checkpoints are in the store. `result`: the one in
        the folder, if there is one.
        """
        if result is not None and result.step < self._step:
            result = None  # of an earlier start
        over, step = self._ended, self._step
        if over is None and result is not None and not self._starts:  # trained in one process
            over, step = (RunPhase.FINISHED, _text(result.reason)), result.step
        until = self._now if over else max(now, self._now)
        phase, reason = over or (self._phase(until), self._log.newest_decision())
        group = self._group
        report = Report(
            name=self._name,
            phase=phase,
            reason=reason,
            began=self._began or 0.0,
            until=until,
            led_s=self._led_s + (until - self._now if self._leads else 0.0),
            step=step,
            starts=self._starts,
            generation=group.generation,
            present=0 if over else len(group.members),
            wanted=0 if over else group.wanted,
            lost=self._log.lost,
            rollbacks=self._log.rollbacks,
            last_line=self._now,
            goodput=self._goodput.goodput(None if over else until),
            exact=result.exact if result else None,
            inexact_because=tuple(map(_text, result.inexact_because if result else ())),
            curves=self._curves.points(),
            band=list(group.band),
            events=list(self._log.events),
            workers=self._workers.rows(),
            slow=list(self._slow.values()),
            failures=self._failures,
            checkpoints=self._checkpoints.rows(stored),
            decisions=list(self._log.decisions),
        )
        return dataclasses.replace(report, verdict=verdict(report))

    # ------------------------------------------------------------------------------ private

    @property
    def _leads(self) -> bool:
        return self._starts > 0 and self._ended is None

    @property
    def _wanted(self) -> int:
        return self._requested if self._limit is None else min(self._requested, self._limit)

    def _phase(self, now: float) -> RunPhase:
        if self._began is None:
            return RunPhase.RUNNING
        limit = max(SILENT_S, SILENT_S_PER_WORKER * len(self._group.members))
        return RunPhase.SILENT if now - self._now > limit else RunPhase.RUNNING

    def _take(self, now: float, line: Mapping[str, Any]) -> None:
        kind = line.get("event") or line.get("command")
        restarts = kind == "ControllerStarted" and not line["takes_over"]
        if self._leads and not restarts:
            self._led_s += max(0.0, now - self._now)
        if not self._starts:
            self._ended = None  # a run in one process is started again without such a line
        self._began = now if self._began is None else min(now, self._began)
        now = self._now = max(now, self._now)
        if kind is None:
            self._curves.line(line)
            self._reach(int(line["step"]))
            return
        self._goodput.line(line)
        for takes in (self._of_run, self._of_worker, self._of_group, self._of_checkpoint):
            takes(kind, now, line)

    def _reach(self, step: int) -> None:
        if step > self._step:
            self._step, self._failures = step, 0

    def _add(self, now: float, kind: EventKind, text: str, **more: Any) -> None:
        event = RunEvent(now, kind, _text(text), self._step, **more)
        self._log.add(event)
        if self._on_event is not None:
            self._on_event(event)

    def _of_run(self, kind: str, now: float, line: Mapping[str, Any]) -> None:
        if kind in ("ControllerStarted", "FinishRun", "FailRun"):
            self._slow = {}
        match kind:
            case "ControllerStarted" if line["takes_over"]:
                self._requested, self._limit = int(line["size"]), None
                self._group.resize(now, self._wanted)
                self._add(now, EventKind.TAKEOVER, "a new controller leads the same workers")
            case "ControllerStarted":
                self._starts += 1
                self._ended = None
                self._requested, self._limit = int(line["size"]), None
                self._workers.begin(now)
                self._group.begin(now, int(line["size"]))
                workers = counted(int(line["size"]), "worker")
                self._add(now, EventKind.START, f"start {self._starts}: {workers} wanted")
            case "Explain":
                self._log.decide(Decision(now, _text(line["text"])))
            case "SizeRequested":
                self._requested = int(line["size"])
                self._group.resize(now, self._wanted)
                self._add(now, EventKind.SCALE, f"{counted(self._requested, 'worker')} asked for")
            case "SizeLimited":
                self._limit = None if line["most"] is None else int(line["most"])
                self._group.resize(now, self._wanted)
                what = "" if self._limit is None else f"at most {counted(self._limit, 'worker')}: "
                self._add(now, EventKind.SCALE, f"{what}{line['reason']}")
            case "StopRequested":
                self._add(now, EventKind.STOP, f"stop requested: {line['reason']}")
            case "FinishRun":
                self._reach(int(line["position"][0]))
                self._end(now, RunPhase.FINISHED, f"{line['reason']}")
            case "FailRun":
                self._end(now, RunPhase.FAILED, f"{line['error']}")

    def _end(self, now: float, phase: RunPhase, reason: str) -> None:
        if self._ended is None:
            self._ended = phase, _text(reason)
            self._add(now, EventKind.END, f"{phase} after step {self._step}: {reason}")
            self._group.end(now)
            self._workers.end(now)

    def _of_worker(self, kind: str, now: float, line: Mapping[str, Any]) -> None:
        workers = self._workers
        match kind:
            case "StartWorker":
                workers.enter(_text(line["worker"]), WorkerCondition.WAITING, now)
            case "WorkerPlaced":
                workers.place(_text(line["worker"]), _text(line["location"][0]), now)
            case "BeginTraining":
                workers.enter(_text(line["worker"]), WorkerCondition.BUILDING, now)
            case "WorkerReady":
                workers.enter(_text(line["worker"]), WorkerCondition.READY, now)
            case "ReleaseWorker":
                reason = _text(line["reason"])
                workers.enter(_text(line["worker"]), WorkerCondition.LEAVING, now, reason)
            case "TimesReported":
                for worker, times in line["times"].items():
                    workers.report(_text(worker), times, int(line["step"]))
                self._reach(int(line["step"]))
            case "SlowWorkersFound":
                slow = [SlowWorker(**one) for one in line["workers"]]
                texts, before = {one.worker: str(one) for one in slow}, self._slow
                self._slow = {one.worker: one for one in slow}
                for worker in texts.keys() - before.keys():
                    self._add(now, EventKind.SLOW, texts[worker], worker=worker)
            case "DrainNoticed":
                worker = _text(line["worker"])
                self._add(now, EventKind.NOTICE, f"the node of {worker} goes away", worker=worker)
            case "EvictWorker":
                worker = _text(line["worker"])
                if not workers.is_gone(worker) and self._log.is_new("evicted", worker):
                    text = f"{worker} is evicted: {line['reason']}"
                    self._add(now, EventKind.EVICTION, text, worker=worker)
            case "WorkerFailed":
                worker, error = _text(line["worker"]), _text(line["error"])
                if self._log.is_new("failed", f"{worker} {error}"):
                    text = f"{worker} raised {error}"
                    self._add(now, EventKind.ERROR, text, worker=worker)
            case "WorkerLost":
                self._lose(now, _text(line["worker"]), line)

    def _lose(self, now: float, worker: str, line: Mapping[str, Any]) -> None:
        cause, reason = str(line.get("cause") or "unknown"), _text(line["reason"])
        if cause == "released":
            if not self._workers.is_gone(worker):
                self._workers.enter(worker, WorkerCondition.LEFT, now)
                self._add(now, EventKind.LEAVE, f"{worker} {reason}", worker=worker)
        else:
            because = reason if cause == "unknown" else f"{cause}: {reason}"
            text = f"{worker} is lost: {because}"
            if self._workers.is_gone(worker):  # its cause is known now
                self._log.explain_loss(worker, _text(text))
                return
            self._workers.enter(worker, WorkerCondition.LOST, now, because)
            if self._ended is None:
                self._add(now, EventKind.LOSS, text, worker=worker)
                self._group.interrupt(now, worker)
        self._group.leave(now, worker)

    def _of_group(self, kind: str, now: float, line: Mapping[str, Any]) -> None:
        match kind:
            case "Explain":
                if found := _ENDS.match(str(line["text"])):
                    self._group.why = _text(found[1])
            case "WorkerStopped":
                self._reach(int(line["position"][0]))
                if self._ended is None and int(line["generation"]) == self._group.generation:
                    self._group.interrupt(now, _text(line["worker"]))
            case "WorkerFinished":
                self._reach(int(line["position"][0]))
            case "FormGeneration":
                members = [_text(worker) for worker in line["members"]]
                pause = self._group.form(now, int(line["generation"]), members)
                if pause is not None:
                    self._failures += 1
                    since, why = pause
                    formed = (
                        f"generation {line['generation']} with {counted(len(members), 'worker')}"
                    )
                    text = f"{why or 'the group changes'}; then {formed}"
                    self._add(since, EventKind.PAUSE, text, seconds=now - since)
                if joined := self._workers.form(members, self._step, now):
                    verb = "joins" if len(joined) == 1 else "join"
                    text = f"{first_few(joined)} {verb}"
                    one = joined[0] if len(joined) == 1 else ""
                    self._add(now, EventKind.JOIN, text, worker=one)

    def _of_checkpoint(self, kind: str, now: float, line: Mapping[str, Any]) -> None:
        match kind:
            case "CheckpointCommitted":
                self._commit(now, int(line["step"]), float(line.get("duration_s", 0.0)) or None)
            case "Explain" if not self._starts:  # a controller adds the event above
                if found := _COMMITTED.fullmatch(str(line["text"])):
                    self._commit(now, int(found[1]), None)
            case "CheckpointFound":
                found_step = int(line["step"] or 0)
                if self._step > found_step and self._group.generation:
                    text = f"every worker with the state is gone: from step {self._step} back"
                    text += f" to step {found_step}"
                    self._add(now, EventKind.ROLLBACK, text)
                self._step = found_step
                self._checkpoints.go_back(found_step)

    def _commit(self, now: float, step: int, seconds: float | None) -> None:
        self._reach(step)
        if self._checkpoints.commit(CheckpointRow(step, now, seconds, stored=False)):
            self._add(now, EventKind.CHECKPOINT, f"checkpoint of step {step}", seconds=seconds)


class _Group:
    """The members of the present generation, their number over time, and the pauses between."""

    def __init__(self) -> None:
        self.generation = 0
        self.members: set[str] = set()
        self.wanted = 0
        self.band = deque[GroupSize](maxlen=MOST_EVENTS)
        self.why = ""  # the generation ended, as the controller said
        self._paused_since: float | None = None

    def resize(self, now: float, wanted: int) -> None:
        self.wanted = wanted
        self._changed(now)

    def interrupt(self, now: float, worker: str) -> None:
        """A member has stopped, or is lost: the group makes no step until the next one forms."""
        if worker in self.members and self._paused_since is None:
            self._paused_since = now

    def leave(self, now: float, worker: str) -> None:
        if worker in self.members:
            self.members.discard(worker)
            self._changed(now)

    def form(self, now: float, generation: int, members: list[str]) -> tuple[float, str] | None:
        """The next generation forms. Return since when the group had paused, and why."""
        pause = None if self._paused_since is None else (self._paused_since, self.why)
        self.generation, self.members = generation, set(members)
        self._paused_since, self.why = None, ""
        self._changed(now)
        return pause

    def begin(self, now: float, wanted: int) -> None:
        """The run is started, perhaps again."""
        self.end(now)
        self.generation, self.wanted = 0, wanted
        self._changed(now)

    def end(self, now: float) -> None:
        self.members, self.wanted, self._paused_since = set(), 0, None
        self._changed(now)

    def _changed(self, now: float) -> None:
        size = GroupSize(now, len(self.members), self.wanted)
        if not self.band or self.band[-1][1:] != size[1:]:
            self.band.append(size)


class _EventLog:
    """The newest events and decisions, and how many losses there were."""

    def __init__(self) -> None:
        self.events = deque[RunEvent](maxlen=MOST_EVENTS)
        self.decisions = deque[Decision](maxlen=MOST_DECISIONS)
        self.lost = 0
        self.rollbacks = 0
        self._told: set[tuple[str, str]] = set()

    def add(self, event: RunEvent) -> None:
        self.lost += event.kind is EventKind.LOSS
        self.rollbacks += event.kind is EventKind.ROLLBACK
        if event.kind is EventKind.START:
            self._told.clear()  # the names of workers are used again
        self.events.append(event)

    def is_new(self, what: str, text: str) -> bool:
        """Whether this is told for the first time; workers repeat what they report."""
        known = (what, text) in self._told
        self._told.add((what, text))
        return not known

    def explain_loss(self, worker: str, text: str) -> None:
        """Put the cause, which was found later, into the event of the loss."""
        for i in range(len(self.events) - 1, -1, -1):
            event = self.events[i]
            if event.kind is EventKind.LOSS and event.worker == worker:
                self.events[i] = dataclasses.replace(event, text=text)
                return

    def decide(self, decision: Decision) -> None:
        if not self.decisions or self.decisions[-1].text != decision.text:
            self.decisions.append(decision)

    def newest_decision(self) -> str:
        return self.decisions[-1].text if self.decisions else ""


class _Checkpoints:
    """The committed checkpoints of the run's history, by step."""

    def __init__(self) -> None:
        self._rows: dict[int, CheckpointRow] = {}

    def commit(self, row: CheckpointRow) -> bool:
        """Return whether the checkpoint is new."""
        is_new = self._rows.setdefault(row.step, row) is row
        for old in list(self._rows)[: max(0, len(self._rows) - MOST_CHECKPOINTS)]:
            del self._rows[old]
        return is_new

    def go_back(self, step: int) -> None:
        """The run goes on from here: later checkpoints do not belong to it any more."""
        self._rows = {each: row for each, row in self._rows.items() if each <= step}

    def rows(self, stored: Collection[int]) -> list[CheckpointRow]:
        """Return the checkpoints by step, with those that only the store has."""
        found = {step: CheckpointRow(step, None, None, stored=True) for step in stored}
        for step, row in self._rows.items():
            found[step] = dataclasses.replace(row, stored=step in stored)
        return [row for _, row in sorted(found.items())]


def _text(value: Any) -> str:
    text = str(value)
    if "://" in text:
        text = redact_url(text)
    return text if len(text) <= MOST_CHARACTERS else text[: MOST_CHARACTERS - 1] + "…"
