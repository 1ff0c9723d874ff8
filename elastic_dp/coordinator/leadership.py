"""Whether this coordinator leads: claims of generations, one after the other, and what to do in
doubt.

A coordinator that heard nobody for a while, because it slept or because the workers follow another
one by now, acts on nothing before it has claimed one more generation: that shows whether it still
leads. Events are deferred until then. The answer to a claim proves who led when it was given; one
that was delayed for long proves nothing, and is asked for again. Deferred events are taken in their
order, and what comes meanwhile after them; not too many at once, so that nobody waits.
"""

import math
from collections import deque

from elastic_dp.coordinator import messages as m
from elastic_dp.coordinator.messages import Event
from elastic_dp.coordinator.run_state import RunState

AT_ONCE = 2000  # deferred events
QUIET_BEATS = 2  # no heartbeat of any worker for so many intervals is odd


class Leadership:
    def __init__(self, run: RunState) -> None:
        self.run = run
        self.quiet_s = QUIET_BEATS * run.config.heartbeat_interval_s
        self.heard_at = -math.inf  # any worker
        self.deferred: deque[Event] | None = None  # not acted on until leadership is confirmed
        self.releasing_at: float | None = None  # it is confirmed; a part was taken then
        self.at_once = AT_ONCE
        self.claiming = 0  # the generation whose claim was sent; 0: none
        self.claimed = 0  # the newest one that is ours
        self._slept, self._asked_at = False, -math.inf

    @property
    def is_unconfirmed(self) -> bool:
        return self.deferred is not None and self.releasing_at is None

    def heard(self, now: float) -> None:
        """A worker."""
        self.heard_at = now

    def claim(self, generation: int, now: float) -> None:
        """Ask for the number after `generation`, and after all that were claimed."""
        self._asked_at = now
        self.claiming = max(generation, self.claimed) + 1
        self.run.emit(m.ClaimGeneration(self.claiming))

    def granted(self, generation: int) -> bool:
        """A claim was answered; whether it is the one that was sent."""
        if generation != self.claiming:
            return False
        self.claiming, self.claimed = 0, generation
        return True

    def in_doubt(self, event: Event, now: float, waiting: bool) -> bool:
        """`waiting`: whether any worker should be heard. What the storage holds tells nothing of
        who leads, and what follows from it (the run's end, or another generation, which needs a
        claim in any case) is only for the one that does."""
        found = isinstance(event, m.CheckpointFound)
        return found or self.fell_quiet(now, waiting) or self._answered_late(event, now)

    def fell_quiet(self, now: float, waiting: bool) -> bool:
        return waiting and now > self.heard_at + self.quiet_s

    def _answered_late(self, event: Event, now: float) -> bool:
        """The answer to a claim was delayed: it proves who led then, not who leads now."""
        ours = event == m.GenerationClaimed(self.claiming)
        return ours and now > self._asked_at + self.run.config.heartbeat_timeout_s

    def confirm(self, generation: int, now: float, slept: bool) -> None:
        """From now on defer what comes, until a claim is granted."""
        self._slept = slept
        self.deferred, self.releasing_at = self.deferred or deque(), None
        if self.claiming:  # one after the other: a number that is skipped may be another's
            self._asked_at = -math.inf
        else:
            self.claim(generation, now)

    def defer(self, event: Event, now: float) -> bool:
        """Whether `event` confirms that this coordinator leads; it comes first then, and any other
        is kept for later."""
        assert self.deferred is not None
        if event != m.GenerationClaimed(self.claiming):
            self.deferred.append(event)
        elif self._answered_late(event, now):
            self.claimed = self.claiming
            self.claim(self.claimed, now)
        else:
            self.deferred.appendleft(event)
            self.releasing_at = now
            return True
        return False

    def enqueue(self, event: Event) -> None:
        """Behind what was deferred."""
        assert self.deferred is not None
        self.deferred.append(event)

    def abandon(self) -> None:
        """Another controller leads: what was deferred is for that one."""
        self.deferred = None

    def was_away(self, now: float) -> bool:
        """As it is confirmed: whether events may have been missed meanwhile."""
        return self._slept or now > self._asked_at + self.run.config.heartbeat_interval_s

    def release(self, now: float) -> list[Event]:
        """The next of what was deferred; with the last, `deferred` is None again."""
        assert self.deferred is not None
        self.heard_at = self.releasing_at = now
        part = [self.deferred.popleft() for _ in range(min(self.at_once, len(self.deferred)))]
        if not self.deferred:
            self.deferred = self.releasing_at = None
        return part
