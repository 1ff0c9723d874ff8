"""Who is slow, from simulated reports: nobody in hours of noise, and the right one soon."""

from itertools import product

import numpy as np
import pytest

from elastic_dp.telemetry.phase_clock import PhaseTimes
from elastic_dp.telemetry.slow_workers import PHASES, WINDOW_S, SlowWorkers, WorkerReport

HOURS_10 = 36_000.0


class Fleet:
    """Workers with realistic noise, by seed: jitter, garbage collections, shared storage whose
    speed changes for all, unequal numbers of micro-batches, stalls of 30 s, a slow first step of
    each worker, and workers that are exchanged for others.

    `slow`: (index, phase, factor, from which second on). Times are seconds.
    """

    def __init__(self, seed, *, workers=None, micro_batches=None, slow=None):
        rng = self.rng = np.random.default_rng(seed)
        size = workers or int(rng.integers(2, 9))
        virtual = micro_batches or int(rng.integers(size, 3 * size))
        self.numbers = np.array([virtual // size + (i < virtual % size) for i in range(size)])
        self.names = [f"w{i}" for i in range(size)]
        self.started, self.slow = size, slow
        self.micro_batch_s = rng.uniform(0.3, 2.0)
        self.jitter, self.data_share = rng.uniform(0.02, 0.3), rng.uniform(0.0, 0.3)
        self.storage, self.overhead = 1.0, rng.uniform(0.0, 0.5) * self.micro_batch_s
        self.now, self.step, self.generation = 0.0, 0, 1
        self.total = np.zeros((size, len(PhaseTimes._fields)))
        self.fresh = list(range(size))
        self.sent, self.sending_s = np.zeros(size), rng.uniform(0.0, 0.5) * self.micro_batch_s

    def run(self, finder, until):
        """Make steps. Yield the time and the slow workers after each look."""
        while self.now < until:
            self._steps(max(1, int(WINDOW_S / 2 / (self.micro_batch_s * max(self.numbers)))))
            finder.look(self.now, self.generation, self._reports())
            yield self.now, finder.found

    def _reports(self):
        columns = self.names, self.total.tolist(), self.numbers.tolist(), self.sent.tolist()
        return {
            name: WorkerReport(self.step, PhaseTimes(*times), number, sending_s=sent)
            for name, times, number, sent in zip(*columns, strict=True)
        }

    def _steps(self, steps):
        rng, size, c = self.rng, len(self.names), self.micro_batch_s
        of_each = self.numbers**-0.5  # sums of n micro-batches vary less

        def noisy(seconds, sigma):
            return seconds * np.exp(sigma * of_each * rng.standard_normal((steps, size)))

        if rng.random() < 0.003:  # for some minutes
            self.storage = rng.choice([1.0, 1.0, 4.0, 12.0])
        compute = noisy(self.numbers * c, self.jitter) + self.overhead
        compute += (rng.random((steps, size)) < 0.02) * rng.exponential(0.3, (steps, size))
        data = noisy(self.numbers * c * self.data_share * self.storage, 0.8)
        other = noisy(np.full(size, 0.1 * c), 0.3)
        sending = noisy(np.full(size, self.sending_s), 0.8)
        if rng.random() < 0.005:
            data[rng.integers(steps), rng.integers(size)] += 30.0
        for i in self.fresh:
            compute[0, i] += rng.uniform(5.0, 60.0)
        self.fresh = []
        if self.slow is not None and self.now >= self.slow[3]:
            i, phase, factor, _ = self.slow
            parts = {"data": data, "compute": compute, "other": other, "collective": sending}
            parts[phase][:, i] += factor * c
        whole = (data + compute + other).max(1) + sending.max(1)
        self.sent += sending.sum(0)
        waits = whole[:, None] - data - compute - other
        for column, part in enumerate((data, compute, waits, other)):
            self.total[:, column] += part.sum(0)
        self.now, self.step = self.now + float(whole.sum()), self.step + steps
        if rng.random() < 0.001 * steps and self.slow is None:
            self._exchange(int(rng.integers(size)))

    def _exchange(self, i):
        self.names[i], self.started = f"w{self.started}", self.started + 1
        self.total[i], self.generation = 0.0, self.generation + 1
        self.fresh.append(i)


@pytest.mark.parametrize("seed", range(12))
def test_no_worker_is_named_in_ten_hours_of_noise(seed):
    fleet = Fleet(seed)
    named = [(now, dict(found)) for now, found in fleet.run(SlowWorkers(), HOURS_10) if found]
    assert not named and fleet.step > 1000


@pytest.mark.parametrize(
    ("phase", "size"), [one for one in product(PHASES, (2, 3, 8)) if one != ("collective", 2)]
)
def test_slow_worker_is_named_within_minutes_with_its_phase_and_cost(phase, size):
    fleet = Fleet(size, workers=size, micro_batches=2 * size, slow=(1, phase, 3.0, 1800.0))
    now, found = next((now, found) for now, found in fleet.run(SlowWorkers(), 3600.0) if found)
    [one] = found.values()
    assert (one.worker, one.phase) == ("w1", phase)
    assert 1800 - 60 <= one.since < 1800 + 120 and now < 1800 + 600
    assert one.ratio > 1.5 and 0.25 < one.cost < 0.75


def test_of_two_workers_nobody_is_named_for_the_link_between_them():
    fleet = Fleet(2, workers=2, micro_batches=4, slow=(slice(2), "collective", 3.0, 1800.0))
    assert not [found for _, found in fleet.run(SlowWorkers(), 3600.0) if found]
