"""Runs of the simulator in which other runs of the cluster limit the size at any time."""

from __future__ import annotations

import random

import pytest

from elastic_dp.coordinator import messages as m
from tests.simulation.world import World

SEEDS, CHUNKS = 120, 3


class LimitedWorld(World):
    """Limits come and go until it is calm, from draws of their own."""

    def run(self):
        self.limits = random.Random(f"limits of {self.seed}")
        self.at(self.limits.uniform(0.0, 10.0), self.limit)
        return super().run()

    def limit(self) -> None:
        most = None if self.calm else self.limits.choice((None, 0, 1, 2, 3))
        self.trace(f"== at most {most}")
        self.post(m.SizeLimited(most, "another run comes first"))
        if not self.calm:
            self.at(self.limits.uniform(0.5, 15.0), self.limit)


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_every_promise_holds_while_the_size_is_limited(chunk: int) -> None:
    for seed in range(chunk * SEEDS // CHUNKS, (chunk + 1) * SEEDS // CHUNKS):
        LimitedWorld(seed).run()
