"""What the earlier starts of a run count towards its result, from its journal: a head node that is
lost takes everything else with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class LossCounted:
    """An event: how many workers this start has lost so far."""

    workers_lost: int


@dataclass(frozen=True, slots=True)
class RunTotals:
    """Generations, lost workers and seconds of several starts together."""

    generations: int = 0
    workers_lost: int = 0
    wall_s: float = 0.0

    @classmethod
    def of(cls, events: Iterable[Mapping[str, Any]]) -> RunTotals:
        """Add up the starts on clusters. The time of a start ends with its last event."""
        total, start, began_at, until = cls(), cls(), None, 0.0
        for line in events:
            if line.get("event") == "ControllerStarted" and not line.get("takes_over"):
                total = total if began_at is None else total._with(start, until - began_at)
                start, began_at = cls(), float(line["time"])
            elif line.get("command") == "FormGeneration":
                start = cls(int(line["generation"]), start.workers_lost)
            elif line.get("event") == "LossCounted":
                start = cls(start.generations, int(line["workers_lost"]))
            until = float(line["time"])
        return total if began_at is None else total._with(start, until - began_at)

    def _with(self, start: RunTotals, wall_s: float) -> RunTotals:
        return RunTotals(
            generations=self.generations + start.generations,
            workers_lost=self.workers_lost + start.workers_lost,
            wall_s=self.wall_s + wall_s,
        )
