"""Decides whether this coordinator leads: it claims generations, and confirms its leadership when
in doubt.

If a coordinator heard no worker for a while, because it slept or because the workers follow another
controller, it does not act before it has claimed one more generation, which shows whether it still
leads. Events are deferred until then. The answer to a claim proves who led when it was given; an
answer that was delayed for long proves nothing, and the claim is repeated. Deferred events are
handled in order, and later ones after them; only a limited number at once, so that workers are
answered in time.
"""

import math
from collections import deque

from elastic_dp.coordinator import messages as m
from elastic_dp.coordinator.messages import Event
from elastic_dp.coordinator.run_state import RunState

MAX_AT_ONCE = 2000  # deferred events that are handled at once
QUIET_BEATS = 2  # silence of all workers for so many heartbeat intervals raises doubt


class Leadership:
    """The claims of this coordinator, and the events that it defers."""

    def __init__(self, run: RunState) -> None:
        self.run = run
        self.quiet_s = QUIET_BEATS * run.config.heartbeat_interval_s
        self.heard_at = -math.inf  # the last message of any worker
        self.deferred: deque[Event] | None = None  # not acted on until leadership is confirmed
        self.releasing_at: float | None = None  # leadership is confirmed; a part was handled then
        self.at_once = MAX_AT_ONCE
        self.claiming = 0  # the generation that is being claimed; 0: none
        self.claimed = 0  # the newest generation that this coordinator owns
        self._slept, self._asked_at = False, -math.inf

    @property
    def is_unconfirmed(self) -> bool:
        """Whether events are deferred until a claim is granted."""
        return self.deferred is not None and self.releasing_at is None

    def claim(self, generation: int, now: float) -> None:
        """Claim the number after `generation` and after all that were claimed before."""
        self._asked_at = now
        self.claiming = max(generation, self.claimed) + 1
        self.run.emit(m.ClaimGeneration(self.claiming))

    def granted(self, generation: int) -> bool:
        """Take the answer to a claim. Return whether it answers the last claim."""
        if generation != self.claiming:
            return False
        self.claiming, self.claimed = 0, generation
        return True

    def in_doubt(self, event: Event, now: float, waiting: bool) -> bool:
        """Return whether leadership must be confirmed before `event` is handled.

        `waiting` says whether any worker should be heard. CheckpointFound always needs a
        confirmation: the storage does not say who leads, and only the leader may act on its answer
        (end the run, or form another generation, which needs a claim in any case).
        """
        found = isinstance(event, m.CheckpointFound)
        return found or self.fell_quiet(now, waiting) or self._answered_late(event, now)

    def fell_quiet(self, now: float, waiting: bool) -> bool:
        """Return whether no worker was heard for too long."""
        return waiting and now > self.heard_at + self.quiet_s

    def _answered_late(self, event: Event, now: float) -> bool:
        """Return whether the answer was delayed: it proves who led then, not who leads now."""
        ours = event == m.GenerationClaimed(self.claiming)
        return ours and now > self._asked_at + self.run.config.heartbeat_timeout_s

    def confirm(self, generation: int, now: float, slept: bool) -> None:
        """Claim a generation to confirm leadership, and defer events until it is granted."""
        self._slept = slept
        self.deferred, self.releasing_at = self.deferred or deque(), None
        # one claim at a time: a number that is skipped may belong to another controller
        if self.claiming:
            self._asked_at = -math.inf
        else:
            self.claim(generation, now)

    def defer(self, event: Event, now: float) -> bool:
        """Defer `event`. Return whether it confirms leadership; such an event is handled first."""
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

    def was_away(self, now: float) -> bool:
        """Return whether events may have been missed before leadership was confirmed."""
        return self._slept or now > self._asked_at + self.run.config.heartbeat_interval_s

    def release(self, now: float) -> list[Event]:
        """Return the next deferred events. With the last of them, `deferred` becomes None."""
        assert self.deferred is not None
        self.heard_at = self.releasing_at = now
        part = [self.deferred.popleft() for _ in range(min(self.at_once, len(self.deferred)))]
        if not self.deferred:
            self.deferred = self.releasing_at = None
        return part
