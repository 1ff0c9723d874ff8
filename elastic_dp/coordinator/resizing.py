"""When workers that are ready take their seats: pure, from what a resize has cost, what it gains, and how often the
group changes anyhow; and why.

Always: one wait has an end, whatever was measured: `stabilization_s` for others that come, and `MOST` times what a resize
costs for the sake of that cost. Who waits misses steps, and whoever joins stops all others once. So those who are ready
wait for the next change, which lets them in for nothing, if it is likely to come before their own would have paid; but
only until they have missed as many steps as a resize costs: then waiting was no better, and may never be (the rule of who
rents skis and does not know for how long). Where nothing was measured yet, a resize counts as free.
"""

import math
from collections import deque
from dataclasses import dataclass
from statistics import median

from elastic_dp.coordinator.coordinator_config import CoordinatorConfig

MOST = 10.0  # pauses: so a resize takes a tenth of the time at most, however little it gains
REMEMBERED = 8  # changes of the group


@dataclass(frozen=True, kw_only=True, slots=True)
class ResizeOutlook:
    """Of those who are ready, now that a generation runs."""

    present: int  # members
    free: int  # seats
    ready: int
    ready_since: float
    building: bool  # others will be ready soon
    joined_at: float  # the last join
    pause_s: float  # what joins have cost the group; 0: not known
    between_s: float  # mean time from one change of the group to the next; inf: not known


def join_at(outlook: ResizeOutlook, config: CoordinatorConfig) -> tuple[float, str]:
    """From when on they should join (inf: not at all), and why not before."""
    if outlook.free <= 0 or not outlook.ready:
        return math.inf, "nobody waits for a free seat"
    patience_s, why = _patience(outlook, config.virtual_workers)
    worth_at = outlook.ready_since + patience_s
    burst_at, others = _burst_over(outlook, config)
    return (worth_at, why) if worth_at > burst_at else (burst_at, others)


def _burst_over(outlook: ResizeOutlook, config: CoordinatorConfig) -> tuple[float, str]:
    """A burst is to make one change, or two: at once where they fill all seats; else they wait for others who build, and
    the next ones for some time after a join. For who is not even started nobody waits, since it may never be."""
    since = outlook.ready_since
    if outlook.ready >= outlook.free:
        return since, "all seats are taken"
    if outlook.building:
        return since + max(
            config.join_window_s, config.stabilization_s
        ), "others will be ready soon"
    after = outlook.joined_at + config.stabilization_s
    return max(since + config.join_window_s, after), "others may come soon"


def _patience(outlook: ResizeOutlook, virtual_workers: int) -> tuple[float, str]:
    """For how long they should wait for a change that is made anyhow."""
    joining = min(outlook.ready, outlook.free)
    gain = speed(outlook.present + joining, virtual_workers) / speed(
        outlook.present, virtual_workers
    )
    most_s = MOST * outlook.pause_s
    pays_s = min(most_s, outlook.pause_s / (gain - 1.0)) if gain > 1.0 else most_s
    if outlook.between_s > pays_s:
        return 0.0, "they are worth the pause"
    return pays_s, (
        f"a resize stops all for {outlook.pause_s:.2g} s, pays after {pays_s:.2g} s, and the group changes every "
        f"{outlook.between_s:.2g} s"
    )


def speed(workers: int, virtual_workers: int) -> float:
    """Steps, in the time that one virtual worker takes: who runs most of them is waited for."""
    return 1.0 / -(-virtual_workers // workers)


class ResizeHistory:
    """Of a run: what joins cost, in steps that were not made meanwhile, and how often the group changes."""

    def __init__(self) -> None:
        self._changed: deque[float] = deque(maxlen=REMEMBERED)
        self._pauses: deque[float] = deque(maxlen=REMEMBERED)
        self._from = 0  # the step that this generation goes on from
        self._began: tuple[float, int] | None = None  # its first step: when, which
        # For a join: when, after which step, how fast.
        self._left: tuple[float, int, float] | None = None

    @property
    def pause_s(self) -> float:
        return median(self._pauses) if self._pauses else 0.0

    def between_s(self, now: float) -> float:
        if len(self._changed) < 3:
            return math.inf
        return (now - self._changed[0]) / (len(self._changed) - 1)

    def changes(self, now: float, stopped_at: float, step: int, joins: bool) -> None:
        """A generation is formed; the one before stopped then, after that step."""
        self._changed.append(now)
        began, self._began, self._left, self._from = self._began, None, None, step
        if joins and began is not None and stopped_at > began[0] and step > began[1]:
            self._left = stopped_at, step, (step - began[1]) / (stopped_at - began[0])

    def steps(self, step: int, at: float) -> None:
        """The newest step of the generation that runs was made then."""
        if self._began is not None or step <= self._from:
            return
        if self._left is not None:
            left_at, left, pace = self._left
            self._pauses.append(max(0.0, at - left_at - (step - left) / pace))
        self._began = at, step
