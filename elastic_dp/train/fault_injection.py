"""Faults that tests inject by name, step and worker, never by sleeping.

The training code passes named points ("forward", "collective", "commit", …). A plan that a worker
gets when it starts says at which points it dies, freezes, sleeps, or flips a bit. Without a plan a
point costs one function call.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from elastic_dp.distributed.local_shards import local_of

# All points, in the order in which a worker passes them; tests enumerate this list.
POINTS = (
    "forming",
    "sending_state",
    "receiving_state",
    "receiving_pieces",
    "restoring",
    "sharing",
    "before_forward",
    "forward",
    "backward",
    "sent",
    "header",
    "exchange",
    "gather",
    "buffers",
    "prepared",
    "gathered",
    "before_commit",
    "after_commit",
    "optimizer",
    "after_step",
    "body",
    "evaluate",
    "evaluate_exchange",
    "keeping",
)

HANDING_OVER = POINTS[:6]  # before a generation's first step


@dataclass(frozen=True, slots=True)
class WorkerFault:
    """What a worker does when it passes `point` for the `nth` time with this step, rank, id and
    world size.

    Values that are None match anything. `once` is a file that the first worker to get here creates,
    so that the fault happens only once. `after` lists such files of faults that must have happened
    in earlier generations. `settled` excludes the first step of a generation, in which members may
    still lack the state. `process` is the number of one within its worker.
    """

    point: str
    step: int | None = None
    rank: int | None = None
    worker: str | None = None
    nth: int = 1
    action: Literal["kill", "freeze", "sleep", "flip"] = "kill"  # flip: a bit of a weight
    seconds: float = 0.0
    world_size: int | None = None
    once: str | None = None
    after: tuple[str, ...] = ()
    settled: bool = False
    process: int | None = None


@dataclass
class FaultInjector:
    """The fault plan of one worker."""

    plan: Sequence[WorkerFault] = ()
    worker: str = ""
    process: int = 0
    weights: Sequence[torch.Tensor] = ()  # in which a bit may be flipped
    _passed: dict[int, int] = field(default_factory=dict)
    _began: dict[int, int] = field(default_factory=dict)  # generation -> its first step here

    def point(self, name: str, step: int, rank: int, world_size: int, generation: int) -> None:
        assert name in POINTS, name
        # A body or an evaluation that continues in a new generation belongs to the step before the
        # first step of that generation.
        settled = name not in HANDING_OVER and step > 1 + self._began.setdefault(generation, step)
        for i, fault in enumerate(self.plan):
            if (
                fault.point == name
                and fault.step in (None, step)
                and fault.rank in (None, rank)
                and fault.worker in (None, self.worker)
                and fault.process in (None, self.process)
                and fault.world_size in (None, world_size)
                and settled >= fault.settled
                and all(_generation_of(path) < generation for path in fault.after)
            ):
                self._passed[i] = self._passed.get(i, 0) + 1
                if self._passed[i] == fault.nth and _is_first(fault, generation):
                    _act(fault, self.weights)


def _is_first(fault: WorkerFault, generation: int) -> bool:
    if fault.once is None:
        return True
    try:
        with open(fault.once, "x", encoding="utf-8") as file:
            file.write(str(generation))
    except FileExistsError:
        return False
    return True


def _generation_of(path: str) -> float:
    """Returns the generation in which the fault of this file happened; infinity: not yet."""
    try:
        with open(path, encoding="utf-8") as file:
            return int(file.read() or sys.maxsize)
    except FileNotFoundError:
        return math.inf


def _act(fault: WorkerFault, weights: Sequence[torch.Tensor]) -> None:
    if fault.action == "sleep":
        time.sleep(fault.seconds)
    elif fault.action == "flip":  # like a memory error: the tensor's version does not change
        local_of(weights[0].data).view(-1)[:1].view(torch.int32).bitwise_xor_(1 << 20)
    else:
        os.kill(os.getpid(), signal.SIGKILL if fault.action == "kill" else signal.SIGSTOP)
