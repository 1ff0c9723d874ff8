"""Several sources in fixed proportions: like an `Order`, but each source goes through its own
epochs.

1. Weights become whole numbers: of the P slots in a *period* each source has its quota (P is
   65,536, rounded up to a multiple of b; at least one slot each). One slot is one row.
2. A period is a circle of slots on which each source is spread evenly: its i-th slot lies at a
   random place in the i-th of as many equal arcs as its quota. (seed, period) picks the places.
3. Every virtual worker goes once around the circle in a period, so that each has the quotas
   exactly; virtual worker v starts at slot v·b. So in a step all of them together have V·b slots in
   a row, and each global batch has its weights but for a few rows.
4. So how many rows of a source virtual worker v has had, j, is one subtraction. Its next row is
   number j·V + v of the source's epochs laid end to end: number n = (j·V + v) mod N of an epoch of
   N rows. That is what virtual worker n mod V of the source's own `Order` consumes as its row n //
   V; n mod V is the same for a whole epoch, so that v keeps to its streams.

So the mixture is a pure function of (seed, step, virtual worker) as well, and each row of a source
is consumed exactly once in each of the source's epochs. Nothing drifts: of one source, the virtual
workers are always within a few rows of each other. A mixture never ends, and no batch is short.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from elastic_dp.errors import DataError
from elastic_dp.sampling.generator import derive, mix64_words
from elastic_dp.sampling.line import Ints
from elastic_dp.sampling.order import OPEN_BYTES, Order, Shuffle

SLOTS = 1 << 16  # of a period, at least: a weight is kept to 1/65,536 of the whole
_SOURCE, _PERIOD = 5, 6  # what a key is for; 1 to 4 are the order's
_PERIODS_KEPT = 2


@dataclass(frozen=True, kw_only=True)
class MixtureSource:
    """`name` for error messages; `weight` > 0, relative to the others'; the rest as in `Order`."""

    name: str
    weight: float
    group_rows: npt.ArrayLike
    group_bytes: npt.ArrayLike | None = None


@dataclass(frozen=True)
class _Circle:
    """The slots of one period, numbered first by source, then as they lie on the circle."""

    slot_at: Ints  # [place]
    place_of: Ints  # [slot]


class Mixture:
    """The surface of `Order`; row groups are numbered through all sources, in their order.

    A source may be smaller than a global batch. Raises DataError if one has no rows.
    """

    def __init__(
        self,
        sources: Sequence[MixtureSource],
        *,
        virtual_workers: int,
        micro_batch_size: int,
        seed: int = 0,
        shuffle: Shuffle = "rows",
    ) -> None:
        self.virtual_workers, self.micro_batch_size = virtual_workers, micro_batch_size
        self.seed = seed
        _check_rows(sources)
        self.period = -(-max(SLOTS, len(sources)) // micro_batch_size) * micro_batch_size
        self.quotas = _quotas([source.weight for source in sources], self.period)
        self._first_slot = np.cumsum([0, *self.quotas])
        groups = [len(np.asarray(source.group_rows)) for source in sources]
        self._first_group = np.cumsum([0, *groups])
        self._orders = [
            Order(
                group_rows=source.group_rows,
                group_bytes=source.group_bytes,
                open_bytes=OPEN_BYTES * quota // self.period,  # all sources are open at one time
                virtual_workers=virtual_workers,
                micro_batch_size=1,  # in a team's stream they take turns of one row
                seed=derive(_SOURCE, seed, number),
                shuffle=shuffle,
                tail="short",
            )
            for number, (source, quota) in enumerate(zip(sources, self.quotas, strict=True))
        ]
        self.num_rows = sum(order.num_rows for order in self._orders)
        self._circles: dict[int, _Circle] = {}

    @property
    def identity(self) -> str:
        """Everything beside the row groups that sets the order; goes into the fingerprint."""
        sources = "; ".join(
            f"{quota} of {order.identity}"
            for quota, order in zip(self.quotas, self._orders, strict=True)
        )
        return (
            f"mixture 1 seed={self.seed} b={self.micro_batch_size} period={self.period}: {sources}"
        )

    @property
    def steps_per_epoch(self) -> int:
        """For reports only: as many rows as all sources have. No source ends its own epoch
        there."""
        return max(1, self.num_rows // (self.virtual_workers * self.micro_batch_size))

    def epoch_of(self, step: int) -> int:
        assert step >= 1, "steps count from 1"
        return (step - 1) // self.steps_per_epoch

    def ends_epoch(self, step: int) -> bool:
        return step % self.steps_per_epoch == 0

    def source_epochs(self, step: int) -> tuple[float, ...]:
        """How often each source was gone through when `step` is done; 1.5 is once and a half."""
        everyone, slots = np.arange(self.virtual_workers), step * self.micro_batch_size
        return tuple(
            int(self._taken(slots, everyone, source).sum()) / order.num_rows
            for source, order in enumerate(self._orders)
        )

    def open_row_groups(self, virtual_workers: int) -> int:
        """As in `Order`, of all sources."""
        return sum(order.open_row_groups(virtual_workers) for order in self._orders)

    def rows(self, step: int, virtual_worker: int) -> int:
        return self.micro_batch_size

    def locate(self, step: int, virtual_worker: int) -> tuple[Ints, Ints]:
        """The row groups and the rows in them, one pair per row of the micro-batch, in its
        order."""
        assert step >= 1 and 0 <= virtual_worker < self.virtual_workers, "no such micro-batch"
        b = self.micro_batch_size
        period, first = divmod((step - 1) * b, self.period)
        places = (np.arange(first, first + b) + virtual_worker * b) % self.period
        slots = self._circle(period).slot_at[places]
        sources = np.searchsorted(self._first_slot, slots, side="right") - 1

        groups, rows = np.empty(b, dtype=np.int64), np.empty(b, dtype=np.int64)
        for source in np.unique(sources).tolist():
            at = np.flatnonzero(sources == source)
            index = self._taken((step - 1) * b, virtual_worker, source) + np.arange(len(at))
            found, rows[at] = self._locate_in_source(source, virtual_worker, index)
            groups[at] = found + self._first_group[source]
        return groups, rows

    def _locate_in_source(self, source: int, virtual_worker: int, index: Ints) -> tuple[Ints, Ints]:
        """`index`: of the virtual worker's rows of the source, counted from 0 through all
        epochs."""
        order, total = self._orders[source], self.virtual_workers
        epochs, number = np.divmod(index * total + virtual_worker, order.num_rows)
        found = [
            order.locate_in_share(epoch, int(of_epoch[0]) % total, of_epoch // total)
            for epoch in np.unique(epochs).tolist()
            for of_epoch in [number[epochs == epoch]]
        ]
        groups, rows = zip(*found, strict=True)
        return np.concatenate(groups), np.concatenate(rows)

    def _taken(self, slots: int, virtual_worker: int | Ints, source: int) -> Ints:
        """How many of the virtual worker's first `slots` slots are the source's."""
        period, rest = divmod(slots, self.period)
        low, behind = self._first_slot[source : source + 2]
        places = self._circle(period).place_of[low:behind]
        start = virtual_worker * self.micro_batch_size % self.period
        stop = start + rest
        passed = np.searchsorted(places, stop % self.period) - np.searchsorted(places, start)
        quota = self.quotas[source]
        return np.asarray(period * quota + passed + np.where(stop >= self.period, quota, 0))

    def _circle(self, period: int) -> _Circle:
        circle = self._circles.get(period)
        if circle is None:
            circle = self._circles[period] = self._lay_out(period)
            near = sorted(list(self._circles), key=lambda other: abs(other - period))
            for old in near[_PERIODS_KEPT:]:
                self._circles.pop(old, None)  # another thread may have been here first
        return circle

    def _lay_out(self, period: int) -> _Circle:
        """In whole numbers: an arc is measured in 2^-24 slots."""
        quota = np.repeat(self.quotas, self.quotas)
        slot = np.arange(self.period)
        number = slot - np.repeat(self._first_slot[:-1], self.quotas)  # among the source's own
        key = np.uint64(derive(_PERIOD, self.seed, period))
        chance = mix64_words(key ^ mix64_words(slot.astype(np.uint64)))
        arc = (self.period << 24) // quota
        inside = (chance % arc.astype(np.uint64)).astype(np.int64)
        slot_at = np.argsort(number * arc + inside, kind="stable")
        place_of = np.empty_like(slot_at)
        place_of[slot_at] = slot
        return _Circle(slot_at, place_of)


def _quotas(weights: Sequence[float], period: int) -> tuple[int, ...]:
    """Whole numbers in proportion to the weights, at least 1 each, that add up to `period`."""
    assert weights and min(weights) > 0, "weights are checked by spec"
    total = sum(map(Fraction, weights))
    wanted = [Fraction(weight) * period / total for weight in weights]
    quotas = [max(1, int(share)) for share in wanted]
    while (missing := period - sum(quotas)) != 0:
        change = 1 if missing > 0 else -1
        free = [source for source, quota in enumerate(quotas) if quota + change >= 1]
        quotas[max(free, key=lambda i: change * (wanted[i] - quotas[i]))] += change
    return tuple(quotas)


def _check_rows(sources: Sequence[MixtureSource]) -> None:
    for source in sources:
        if not np.sum(source.group_rows):
            raise DataError(f"{source.name} has no rows; leave this source out")


def row_groups_at_once(order: Order | Mixture) -> int:
    """How many a worker that runs the whole job has in memory: while one takes the place of
    another, all others stay."""
    return order.open_row_groups(order.virtual_workers) + 1


def row_groups_at_least(order: Order | Mixture) -> int:
    """With memory for fewer, it would read them again and again. Where one is open, the next can
    wait until it is gone."""
    return count if (count := row_groups_at_once(order)) > 2 else 1
