"""How often each kind of fault happens in one simulated run, drawn from its seed."""

from __future__ import annotations

import random
from dataclasses import MISSING, dataclass, fields, replace


@dataclass(frozen=True)
class FaultProfile:
    """What goes wrong in one run, and how often (weights; 0: never). Times are in seconds."""

    steps: int
    slots: int  # workers the cluster has room for
    chaos_s: float  # how long anything may happen
    pause_s: float  # mean time between two faults
    slow_messages: float  # fraction that is late by seconds
    doubled: float
    compute_s: float
    body_s: float
    torn: float  # fraction of hand-overs that fail half-way
    commit_steps: int  # a checkpoint after every so many steps; 0: none
    kill: float
    silent_kill: float
    kill_source: float
    kill_joiner: float
    kill_all: float
    freeze: float
    cut: float
    cut_initial_source: float
    kill_ahead: float
    false_failure: float
    drain: float
    scale: float
    stop: float
    misfit: float
    user_error: float
    bad_pair: float
    crash_controller: float
    freeze_controller: float
    hang: float = 0.0
    flip: float = 0.0
    uneven: float = 0.0  # not 0: workers differ in speed, and it changes
    drain_all: float = 0.0
    drain_head: float = 0.0
    gradual: bool = False  # workers that join take the state over in parts

    @classmethod
    def drawn(cls, rng: random.Random) -> FaultProfile:
        faults = {
            field.name: rng.choice((0.0, 0.0, 1.0, 3.0))
            for field in fields(cls)
            if field.name in FAULTS and field.default is MISSING
        }
        faults["kill_all"] *= rng.choice((0.02, 0.2))
        faults["stop"] *= 0.05
        faults["misfit"] = rng.choice((0.0, 0.0, 0.0, 0.3))
        return cls(
            steps=rng.randint(2, 24),
            slots=rng.randint(1, 7),
            chaos_s=rng.choice((5.0, 30.0, 60.0)),
            pause_s=rng.choice((0.3, 1.5, 5.0, 15.0)),
            slow_messages=rng.choice((0.0, 0.0, 0.05, 0.3)),
            doubled=rng.choice((0.0, 0.05, 0.3)),
            compute_s=rng.choice((0.1, 0.5, 2.0)),
            body_s=rng.choice((0.0, 0.0, 0.3, 8.0)),
            torn=rng.choice((0.0, 0.0, 0.2)),
            commit_steps=rng.choice((0, 0, 1, 5)),
            **{k: v for k, v in faults.items() if k != "misfit"},
            misfit=faults["misfit"],
        )

    def with_more(self, seed: int) -> FaultProfile:
        """Add newer faults from a generator of their own, so most seeds keep their profile."""
        rng = random.Random(~seed)
        hang, flip = (rng.choice((0.0, 0.0, 0.0, 1.0)) for _ in range(2))
        uneven = rng.choice((0.0, 0.0, 0.0, 0.0, 0.0, 1.0))
        drain_all = rng.choice((0.0, 0.0, 0.0, 0.0, 0.0, 0.3))
        drain_head = rng.choice((0.0, 0.0, 0.0, 0.0, 0.0, 0.3))
        gradual = rng.choice((False, False, True))
        return replace(
            self,
            hang=hang,
            flip=flip,
            uneven=uneven,
            drain_all=drain_all,
            drain_head=drain_head,
            gradual=gradual,
        )


FAULTS = (
    "kill",
    "silent_kill",
    "kill_source",
    "kill_joiner",
    "kill_all",
    "freeze",
    "cut",
    "cut_initial_source",
    "kill_ahead",
    "false_failure",
    "drain",
    "scale",
    "stop",
    "user_error",
    "bad_pair",
    "crash_controller",
    "freeze_controller",
    "hang",
    "flip",
    "drain_all",
    "drain_head",
)
