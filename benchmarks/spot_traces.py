"""A spot market: how many places there are from when on, as it was recorded and as it may be drawn.
Pure."""

from __future__ import annotations

import bisect
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

PLACES = 4

# Second, instances that AWS gave of the 12 asked for (g4dn.xlarge, us-east-1c, 2020-11-20 19:30 to
# 2020-11-21 22:00, from the eighth hour on). doc/data/ of github.com/uclasystem/bamboo, of "Bamboo"
# (NSDI 2023); Copyright (c) 2022 UCLASystem, MIT License.
G4DN = (
    *((28578, 12), (43064, 8), (43130, 6), (43574, 5), (44224, 9), (44247, 12), (48805, 11)),
    *((50300, 12), (53365, 6), (53480, 5), (56483, 10), (56544, 12), (62986, 11), (64490, 12)),
    *((65917, 10), (66602, 9), (66938, 8), (68000, 12), (68050, 11), (68245, 12), (81120, 10)),
    *((82267, 9), (82457, 6), (83045, 12), (86109, 9), (86585, 12), (87019, 11), (87607, 10)),
    *((87732, 9), (88032, 8), (88194, 7)),
)


@dataclass(frozen=True)
class Trace:
    """Places from each instant on."""

    name: str
    seconds: float
    changes: tuple[tuple[float, int], ...]

    @property
    def spans(self) -> Iterator[tuple[float, float, int]]:
        """From, until, places."""
        ends = [*(at for at, _ in self.changes[1:]), self.seconds]
        return ((at, end, n) for (at, n), end in zip(self.changes, ends, strict=True))

    @property
    def place_seconds(self) -> float:
        return sum((end - at) * places for at, end, places in self.spans)

    def places(self, at: float) -> int:
        starts = [start for start, _ in self.changes]
        return self.changes[max(0, bisect.bisect_right(starts, at) - 1)][1]


def published(seconds: float, most: int = PLACES) -> Trace:
    """`G4DN`, with `most` places for its twelve instances, rounded up."""
    first, last = G4DN[0][0], G4DN[-1][0]
    changes: list[tuple[float, int]] = []
    for at, instances in G4DN:
        places = math.ceil(instances * most / 12)
        if not changes or changes[-1][1] != places:
            changes.append((seconds * (at - first) / (last - first), places))
    return Trace("AWS g4dn.xlarge, us-east-1c", seconds, tuple(changes))


def generated(
    name: str, seconds: float, lost_every_s: float, back_after_s: float, seed: int
) -> Trace:
    """Each place is lost after an exponential time, and is back after another."""
    rng = random.Random(seed)
    edges = []
    for _ in range(PLACES):
        at, up = 0.0, 1
        while at < seconds:
            at += rng.expovariate(1 / (lost_every_s if up else back_after_s))
            up = 1 - up
            edges.append((at, 2 * up - 1))
    changes, places = [(0.0, PLACES)], PLACES
    for at, change in sorted(edges):
        if at < seconds and 1 <= places + change <= PLACES:
            places += change
            changes.append((at, places))
    return Trace(name, seconds, tuple(changes))
