"""Who slows a run down, by how much, and with what, from the times that its workers report.

Members of a generation do equal work for each micro-batch, and all wait for the slowest of them in
each step. So seconds per micro-batch of waiting for data and of computing are compared with the
median of the members, and so is the rest of a step. The time in collectives says nothing, since
there each waits for the slowest. What tells a slow link is for how long that which a worker sends
is under way to whichever member it reaches soonest. Of two members nobody can tell whose it is.

Times are added up over windows of several steps. A worker is slow once `FOUND` of the last
`WINDOWS` show it, and until fewer than `KEPT` do, so a stall, however long, neither makes a verdict
nor hides one. The first window of a generation does not count: its steps compile, and read what
moved with the members.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Any, NamedTuple

from elastic_dp.telemetry.phase_clock import PhaseTimes

WINDOW_S, STEPS = 10.0, 5  # at least, of a window
WINDOWS, FOUND, KEPT = 12, 11, 6
COST, RATIO = 0.05, 1.25  # at least, of a step, and of the time that the others take
SPREAD = 4.0  # at least, times the median distance of the members from their median
PAIR = 2.0  # times as much of all where one other worker is all there is to compare with
PHASES = ("data", "compute", "other", "collective")
WORDS = {"collective": "sending in collectives"}


@dataclass(frozen=True, slots=True)
class SlowWorker:
    """A worker that slows the run down since `since` (of `time.time`) and the step after `step`.

    `ratio`: its time in `phase`, compared with what it would be at the pace of the others. `cost`:
    the fraction of a step that the run would gain.
    """

    worker: str
    node: str
    phase: str
    since: float
    step: int
    ratio: float
    cost: float

    @property
    def why(self) -> str:
        what = WORDS.get(self.phase, self.phase)
        return (
            f"{what} takes {self.ratio:.1f} times as long as with the others, which costs the run "
            f"{100 * self.cost:.0f} %"
        )

    def __str__(self) -> str:
        where = f" on node {self.node[:15]}" if self.node else ""
        since = time.strftime("%H:%M", time.localtime(self.since))
        return f"{self.worker}{where} is slow since {since} (step {self.step}): {self.why}"


@dataclass(frozen=True, slots=True)
class SlowWorkersFound:
    """All slow workers from now on, as dicts; recorded when they change."""

    workers: tuple[dict[str, Any], ...]


class WorkerReport(NamedTuple):
    """What a worker has reported last."""

    step: int  # committed steps
    times: PhaseTimes
    micro_batches: int  # of a step
    micro_batch_s: float = 0.0  # of its device; 0: not known
    sending_s: float = 0.0  # in this generation, on its fastest link


class _Window(NamedTuple):
    """One worker in one window, compared with the others: seconds per step, by phase."""

    since: float
    step: int
    excess: tuple[float, ...]
    usual: tuple[float, ...]
    cost: float  # of a step
    shows: bool


class SlowWorkers:
    """Finds the slow members of one generation after the other. Reads no clock."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self.window_s, self._generation = window_s, 0
        self._opened: tuple[float, Mapping[str, WorkerReport]] = 0.0, {}
        self._is_warm = False  # a window of this generation is over
        self._recent: dict[str, deque[_Window]] = {}
        self.found: dict[str, SlowWorker] = {}

    def forget(self, workers: Iterable[str]) -> None:
        """These workers are gone."""
        for worker in workers:
            self._recent.pop(worker, None)
            self.found.pop(worker, None)

    def look(self, now: float, generation: int, reports: Mapping[str, WorkerReport]) -> None:
        """Take the newest reports of all members, and update `found` if a window is over."""
        if generation != self._generation:
            self._generation, self._opened, self._is_warm = generation, (now, reports), False
            self.forget(self._recent.keys() - reports.keys())
            return
        since, before = self._opened
        steps = min(reports[worker].step - one.step for worker, one in before.items())
        if now < since + self.window_s or steps < STEPS:
            return
        if self._is_warm and len(before) > 1:
            self._compare(since, before, reports)
        self._opened, self._is_warm = (now, reports), True

    def _compare(
        self,
        since: float,
        before: Mapping[str, WorkerReport],
        after: Mapping[str, WorkerReport],
    ) -> None:
        numbers = [one.micro_batches for one in before.values()]
        paces = [_seconds_per_step(one, after[worker]) for worker, one in before.items()]
        data, compute, other, sending, work, waits = zip(*paces, strict=True)
        once = [1] * len(numbers)
        phases = [_usual(data, numbers), _usual(compute, numbers)]
        phases += [_usual(other, once), _usual(sending, once)]
        works = _usual(work, numbers)
        exchange_s = min(waits) if len(numbers) > 2 else 0.0  # of two, both see the same link
        whole_s = max(median_low(map(sum, zip(work, other, waits, strict=True))), 1e-9)
        factor = PAIR if len(numbers) == 2 else 1.0
        for i, (worker, one) in enumerate(before.items()):
            usual = tuple(phase[i][0] for phase in phases)
            *excess, late_s = (s - u for s, u in zip(paces[i], usual, strict=False))
            excess.append(min(max(0.0, late_s), exchange_s))  # the rest is hidden by computation
            cost = (work[i] - works[i][0] + excess[2] + excess[3]) / whole_s
            worst = excess.index(max(excess))
            limits = COST * whole_s, (RATIO - 1.0) * usual[worst], SPREAD * phases[worst][i][1]
            shows = cost > factor * COST and excess[worst] > factor * max(limits)
            self._add(worker, _Window(since, one.step, tuple(excess), usual, cost, shows), whole_s)

    def _add(self, worker: str, window: _Window, whole_s: float) -> None:
        recent = self._recent.setdefault(worker, deque(maxlen=WINDOWS))
        recent.append(window)
        known = self.found.pop(worker, None)
        if sum(each.shows for each in recent) >= (KEPT if known else FOUND):
            self.found[worker] = _verdict(worker, recent, known, whole_s)


def _verdict(
    worker: str, recent: Sequence[_Window], known: SlowWorker | None, whole_s: float
) -> SlowWorker:
    number, first = len(recent), known or next(one for one in recent if one.shows)
    excess = [sum(each) for each in zip(*(one.excess for one in recent), strict=True)]
    i = excess.index(max(excess))
    # Waits for data may take no time with the others.
    usual_s = max(sum(one.usual[i] for one in recent), 0.01 * number * whole_s)
    ratio, cost = 1.0 + excess[i] / usual_s, sum(one.cost for one in recent) / number
    return SlowWorker(worker, "", PHASES[i], first.since, first.step, ratio, cost)


def _seconds_per_step(before: WorkerReport, after: WorkerReport) -> tuple[float, ...]:
    """Return the seconds of each phase; of data and compute, as far as a device does not overlap
    them; and of collectives."""
    steps, spent = after.step - before.step, after.times.plus(before.times, -1)
    device_s = steps * after.micro_batch_s * after.micro_batches
    other, sending = spent.other + spent.checkpoint, after.sending_s - before.sending_s
    host_s, compute = spent.data + spent.compute, max(spent.compute, device_s)
    work = max(host_s, device_s)
    waits = max(0.0, host_s + spent.collective - work)  # without what the device computes meanwhile
    return tuple(s / steps for s in (spent.data, compute, other, sending, work, waits))


def _usual(seconds: Sequence[float], numbers: Sequence[int]) -> list[tuple[float, float]]:
    """Return what each worker's seconds would be at the pace of the others, and how far members
    usually are from that. `numbers`: of their micro-batches.

    Some of a step's time does not depend on the number of micro-batches. A worker that has fewer or
    more than the others is not to blame for that, so the larger of two medians counts.
    """
    step_s = median_low(seconds)
    each = [s / number for s, number in zip(seconds, numbers, strict=True)]
    micro_batch_s = median_low(each)
    spread_s = median_low(abs(s - micro_batch_s) for s in each)
    return [(max(step_s, micro_batch_s * number), spread_s * number) for number in numbers]
