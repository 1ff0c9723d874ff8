"""A mixture of sources in fixed proportions: like an `Order`, but each source has its own epochs.

1. Weights become integers: of the P slots in a *period* each source has its quota (P is 65,536,
  rounded up to a multiple of b; at least one slot each). One slot is one row.
2. A period is a circle of slots over which each source is spread evenly: its i-th slot lies at a
  random position in the i-th of as many equal arcs as its quota. (seed, period) selects the
  positions.
3. Every virtual worker goes once around the circle in a period, so each has exactly the quotas;
  virtual worker v starts at slot v·b. So in one step all of them together have V·b consecutive
  slots, and each global batch has its weights but for a few rows.
4. So the number of rows of a source that virtual worker v has consumed, j, is one subtraction. Its
  next row is number j·V + v of the source's epochs laid end to end: number n = (j·V + v) mod N of
  an epoch of N rows. That is the row that virtual worker n mod V of the source's own `Order`
  consumes as its row n // V; n mod V is the same for a whole epoch, so v keeps to its streams.

The mixture is a pure function of (seed, step, virtual worker), too, and each row of a source is
consumed exactly once in each of the source's epochs. Nothing drifts: the virtual workers are always
within a few rows of each other in each source. A mixture never ends, and no batch is short.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from elastic_dp.errors import DataError
from elastic_dp.sampling.epoch_order import Ints
from elastic_dp.sampling.keyed_permutation import derive, mix64_words
from elastic_dp.sampling.order import OPEN_BYTES, Order, Shuffle

SLOTS = 1 << 16  # least number of slots in a period, so weights are exact to 1/65,536
_SOURCE, _PERIOD = 5, 6  # the purposes of keys; 1 to 4 are used by `Order`
_PERIODS_KEPT = 2


@dataclass(frozen=True, kw_only=True)
class MixtureSource:
    """One source. `name` is for error messages; `weight` > 0 is relative to the other sources.

    The other fields are as in `Order`.
    """

    name: str
    weight: float
    group_rows: npt.ArrayLike
    group_bytes: npt.ArrayLike | None = None


@dataclass(frozen=True)
class _Cycle:
    """The slots of one period, numbered by source, and by their position on the circle."""

    slot_at: Ints  # [position]
    position_of: Ints  # [slot]


class Mixture:
    """The interface of `Order` over several sources; row groups are numbered through all sources.

    A source may be smaller than a global batch. Raises DataError if a source has no rows.
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
                micro_batch_size=1,  # in a team's stream, virtual workers take turns of one row
                seed=derive(_SOURCE, seed, number),
                shuffle=shuffle,
                tail="short",
            )
            for number, (source, quota) in enumerate(zip(sources, self.quotas, strict=True))
        ]
        self.num_rows = sum(order.num_rows for order in self._orders)
        self._circles: dict[int, _Cycle] = {}

    @property
    def identity(self) -> str:
        """All parameters, besides the row groups, that determine the order; part of the
        fingerprint.
        """
        sources = "; ".join(
            f"{quota} of {order.identity}"
            for quota, order in zip(self.quotas, self._orders, strict=True)
        )
        return (
            f"mixture 1 seed={self.seed} b={self.micro_batch_size} period={self.period}: {sources}"
        )

    @property
    def steps_per_epoch(self) -> int:
        """Steps for as many rows as all sources have. For reports only: no source ends its epoch
        there.
        """
        return max(1, self.num_rows // (self.virtual_workers * self.micro_batch_size))

    def epoch_of(self, step: int) -> int:
        assert step >= 1, "steps count from 1"
        return (step - 1) // self.steps_per_epoch

    def ends_epoch(self, step: int) -> bool:
        return step % self.steps_per_epoch == 0

    def open_row_groups(self, virtual_workers: int) -> int:
        """Return the number of open row groups of all sources; see `Order.open_row_groups`."""
        return sum(order.open_row_groups(virtual_workers) for order in self._orders)

    def rows(self, step: int, virtual_worker: int) -> int:
        return self.micro_batch_size

    def locate(self, step: int, virtual_worker: int) -> tuple[Ints, Ints]:
        """Return the row groups and the rows in them, one pair per row of the micro-batch, in
        order.
        """
        assert step >= 1 and 0 <= virtual_worker < self.virtual_workers, "no such micro-batch"
        b = self.micro_batch_size
        period, first = divmod((step - 1) * b, self.period)
        positions = (np.arange(first, first + b) + virtual_worker * b) % self.period
        slots = self._cycle(period).slot_at[positions]
        sources = np.searchsorted(self._first_slot, slots, side="right") - 1

        groups, rows = np.empty(b, dtype=np.int64), np.empty(b, dtype=np.int64)
        for source in np.unique(sources).tolist():
            at = np.flatnonzero(sources == source)
            index = self._taken((step - 1) * b, virtual_worker, source) + np.arange(len(at))
            found, rows[at] = self._locate_in_source(source, virtual_worker, index)
            groups[at] = found + self._first_group[source]
        return groups, rows

    def _locate_in_source(self, source: int, virtual_worker: int, index: Ints) -> tuple[Ints, Ints]:
        """Locate rows of a source. `index` counts the virtual worker's rows of it through all
        epochs.
        """
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
        """Return how many of the virtual worker's first `slots` slots belong to the source."""
        period, rest = divmod(slots, self.period)
        low, behind = self._first_slot[source : source + 2]
        positions = self._cycle(period).position_of[low:behind]
        start = virtual_worker * self.micro_batch_size % self.period
        stop = start + rest
        passed = np.searchsorted(positions, stop % self.period) - np.searchsorted(positions, start)
        quota = self.quotas[source]
        return np.asarray(period * quota + passed + np.where(stop >= self.period, quota, 0))

    def _cycle(self, period: int) -> _Cycle:
        circle = self._circles.get(period)
        if circle is None:
            circle = self._circles[period] = self._lay_out(period)
            near = sorted(list(self._circles), key=lambda other: abs(other - period))
            for old in near[_PERIODS_KEPT:]:
                self._circles.pop(old, None)  # another thread may have been here first
        return circle

    def _lay_out(self, period: int) -> _Cycle:
        """Place the slots of a period on its circle, in integers: an arc is measured in 2^-24
        slots.
        """
        quota = np.repeat(self.quotas, self.quotas)
        slot = np.arange(self.period)
        # the slot's number within its source
        number = slot - np.repeat(self._first_slot[:-1], self.quotas)
        key = np.uint64(derive(_PERIOD, self.seed, period))
        chance = mix64_words(key ^ mix64_words(slot.astype(np.uint64)))
        arc = (self.period << 24) // quota
        inside = (chance % arc.astype(np.uint64)).astype(np.int64)
        slot_at = np.argsort(number * arc + inside, kind="stable")
        position_of = np.empty_like(slot_at)
        position_of[slot_at] = slot
        return _Cycle(slot_at, position_of)


def _quotas(weights: Sequence[float], period: int) -> tuple[int, ...]:
    """Return integers in proportion to the weights, at least 1 each, with the sum `period`."""
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
    """Return how many row groups a worker that runs the whole job has in memory.

    While one replaces another, all others stay.
    """
    return order.open_row_groups(order.virtual_workers) + 1


def row_groups_at_least(order: Order | Mixture) -> int:
    """Return the least number of row groups that need memory; with less they would be read
    repeatedly.

    If only one is open, the next can wait until it is released.
    """
    return count if (count := row_groups_at_once(order)) > 2 else 1
