"""Faults placed by name, step and worker: never by sleeping and hoping.

The training code passes named points ("forward", "collective", "commit", …). A plan, given to a worker when it
starts, says at which of them it dies, freezes, or is held. Without a plan a point costs one function call.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

# Every point there is, in the order of a worker's life; tests enumerate this list.
POINTS = (
    "forming",
    "giving_state",
    "taking_state",
    "before_forward",
    "forward",
    "backward",
    "first_header",
    "exchange",
    "closing_header",
    "gather",
    "buffers",
    "before_commit",
    "after_commit",
    "optimizer",
    "after_step",
    "body",
    "evaluate",
    "evaluate_exchange",
)


@dataclass(frozen=True, slots=True)
class Fault:
    """At the `nth` passing of `point` in step `step` (None: any) by a worker of this rank or identity."""

    point: str
    step: int | None = None
    rank: int | None = None
    worker: str | None = None
    nth: int = 1
    action: Literal["kill", "freeze", "sleep"] = "kill"
    seconds: float = 0.0


@dataclass
class Faults:
    """The plan of one worker."""

    plan: Sequence[Fault] = ()
    worker: str = ""
    _passed: dict[int, int] = field(default_factory=dict)

    def point(self, name: str, step: int, rank: int) -> None:
        if not self.plan:
            return
        assert name in POINTS, name
        for i, fault in enumerate(self.plan):
            if (
                fault.point == name
                and fault.step in (None, step)
                and fault.rank in (None, rank)
                and fault.worker in (None, self.worker)
            ):
                self._passed[i] = self._passed.get(i, 0) + 1
                if self._passed[i] == fault.nth:
                    _act(fault)


def _act(fault: Fault) -> None:
    if fault.action == "sleep":
        time.sleep(fault.seconds)
    else:
        os.kill(os.getpid(), signal.SIGKILL if fault.action == "kill" else signal.SIGSTOP)
