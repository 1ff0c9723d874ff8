"""How many losses a run may have without a step in between, and how long to pause after each.

What is counted is not workers but incidents: a rack that goes takes fifty workers in one incident, while a
sample that kills its worker makes a new one each time. So a loss is new if the generation that it broke was
formed after the last incident, or if the worker was asked for after it.
"""

from dataclasses import dataclass

FREE = 3  # incidents that cost no pause
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0


@dataclass(slots=True)
class Budget:
    limit: int
    incidents: int = 0
    _generation: int = -1
    _identities: int = 0

    def progressed(self) -> None:
        self.incidents = 0

    def counts(self, generation: int, number: int, identities: int) -> bool:
        """A loss in `generation` of the worker with `number`; `identities` were given out so far."""
        if self.incidents and generation <= self._generation and number <= self._identities:
            return False
        self._generation, self._identities = generation, identities
        self.incidents += 1
        return True

    @property
    def exhausted(self) -> bool:
        return self.incidents > self.limit

    @property
    def pause_s(self) -> float:
        if self.incidents <= FREE:
            return 0.0
        return float(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(self.incidents - FREE - 1, 16)))
