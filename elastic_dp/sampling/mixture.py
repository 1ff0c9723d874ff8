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

Weights may change after a given number of steps. Then another *stage* begins, with quotas and
periods of its own, and each virtual worker goes on with the row after its last one of each source.
How many it has consumed is a sum over the stages before, so nothing needs to be stored.

The mixture is a pure function of (seed, step, virtual worker), too, and each row of a source is
consumed exactly once in each of the source's epochs. Nothing drifts: the virtual workers are always
within a few rows of each other in each source. A mixture never ends, and no batch is short.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from elastic_dp.errors import DataError
from elastic_dp.sampling.epoch_order import Ints
from elastic_dp.sampling.keyed_permutation import derive, mix64_words
from elastic_dp.sampling.order import NOTHING, OPEN_BYTES, BaseOrder, Order, Shuffle

SLOTS = 1 << 16  # least number of slots in a period, so weights are exact to 1/65,536
_SOURCE, _PERIOD = 5, 6  # the purposes of keys; 1 to 4 are used by `Order`
_PERIODS_KEPT = 2


@dataclass(frozen=True, kw_only=True)
class MixtureSource:
    """One source. `name` is for error messages; `weight` is relative to the other sources.

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


@dataclass(frozen=True, eq=False)
class _Stage:
    """The steps after `begin` steps, up to the next stage.

    - `quotas`: slots of each source in a period; 0 for a source without weight.
    - `first_slot` int64 [sources + 1]: the slots of source i are first_slot[i] ≤ j <
      first_slot[i + 1].
    - `taken` int64 [sources, virtual workers]: rows consumed in the stages before.
    """

    begin: int
    quotas: tuple[int, ...]
    first_slot: Ints
    taken: Ints


class Mixture(BaseOrder):
    """The order over several sources; row groups are numbered through all sources.

    A source may be smaller than a global batch. `changes`: the weights of all sources that hold
    after so many steps; the sources' own weights hold before. A weight may be 0. Raises DataError
    if a source has no rows.
    """

    tail = None
    no_rows = NOTHING, NOTHING

    def __init__(
        self,
        sources: Sequence[MixtureSource],
        *,
        virtual_workers: int,
        micro_batch_size: int,
        seed: int = 0,
        shuffle: Shuffle = "rows",
        changes: Mapping[int, Sequence[float]] | None = None,
    ) -> None:
        self.virtual_workers, self.micro_batch_size = virtual_workers, micro_batch_size
        self.seed = seed
        _check_rows(sources)
        self.period = -(-max(SLOTS, len(sources)) // micro_batch_size) * micro_batch_size
        weights = {0: [source.weight for source in sources], **(changes or {})}
        quotas = {begin: _quotas(weights[begin], self.period) for begin in sorted(weights)}
        shares = [max(each) for each in zip(*quotas.values(), strict=True)]
        groups = [len(np.asarray(source.group_rows)) for source in sources]
        self._first_group = np.cumsum([0, *groups])
        self._orders = [
            Order(
                group_rows=source.group_rows,
                group_bytes=source.group_bytes,
                open_bytes=OPEN_BYTES * share // sum(shares),  # all sources are open at one time
                virtual_workers=virtual_workers,
                micro_batch_size=1,  # in a team's stream, virtual workers take turns of one row
                seed=derive(_SOURCE, seed, number),
                shuffle=shuffle,
                tail="short",
            )
            for number, (source, share) in enumerate(zip(sources, shares, strict=True))
        ]
        self.num_rows = sum(order.num_rows for order in self._orders)
        # For as many rows as all sources have. For reports only: no source ends its epoch there.
        self.steps_per_epoch = max(1, self.num_rows // (virtual_workers * micro_batch_size))
        self._cycle = lru_cache(_PERIODS_KEPT)(self._lay_out)  # by stage and period
        self._stages: list[_Stage] = []
        for begin, quota in quotas.items():
            self._stages.append(
                _Stage(begin, quota, np.cumsum([0, *quota]), self._all_taken(begin))
            )
        each = zip(self._stages[0].quotas, self._orders, strict=True)
        parts = "; ".join(f"{quota} of {order.identity}" for quota, order in each)
        later = "".join(f"; after {stage.begin}: {stage.quotas}" for stage in self._stages[1:])
        self.identity = (
            f"mixture 1 seed={seed} b={micro_batch_size} period={self.period}: {parts}{later}"
        )

    def open_row_groups(self, virtual_workers: int) -> int:
        """Return the number of open row groups of all sources; see `Order.open_row_groups`."""
        return sum(order.open_row_groups(virtual_workers) for order in self._orders)

    def rows(self, step: int, virtual_worker: int) -> int:
        return self.micro_batch_size

    def locate_each(self, steps: range, virtual_worker: int) -> list[tuple[Ints, Ints]]:
        assert steps.start >= 1 and 0 <= virtual_worker < self.virtual_workers, "no such step"
        b = self.micro_batch_size
        groups, rows = np.empty((2, len(steps) * b), dtype=np.int64)
        step = steps.start
        while step < steps.stop:
            number = self._stage_after(step - 1)
            stage = self._stages[number]
            period, first = divmod((step - 1 - stage.begin) * b, self.period)
            end = min(steps.stop, step + (self.period - first) // b)
            if number + 1 < len(self._stages):
                end = min(end, self._stages[number + 1].begin + 1)
            positions = np.arange(first, first + (end - step) * b) + virtual_worker * b
            slots = self._cycle(number, period).slot_at[positions % self.period]
            sources = np.searchsorted(stage.first_slot, slots, side="right") - 1
            offset = (step - steps.start) * b
            for source in np.unique(sources).tolist():
                at = np.flatnonzero(sources == source)
                index = self._taken(step - 1, virtual_worker, source) + np.arange(len(at))
                found, rows[offset + at] = self._locate_in_source(source, virtual_worker, index)
                groups[offset + at] = found + self._first_group[source]
            step = end
        return [(groups[at : at + b], rows[at : at + b]) for at in range(0, len(groups), b)]

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

    def _stage_after(self, steps: int) -> int:
        """Return the number of the stage that holds after so many steps."""
        return bisect_right(self._stages, steps, key=lambda stage: stage.begin) - 1

    def _all_taken(self, steps: int) -> Ints:
        """Return `_taken` of all sources and virtual workers, [sources, virtual workers]."""
        everyone = np.arange(self.virtual_workers)
        if not steps:
            return np.zeros((len(self._orders), len(everyone)), dtype=np.int64)
        return np.stack([self._taken(steps, everyone, n) for n in range(len(self._orders))])

    def _taken(self, steps: int, virtual_worker: int | Ints, source: int) -> Ints:
        """Return how many rows of the source the virtual worker consumes in the first `steps`."""
        number = self._stage_after(steps)
        stage = self._stages[number]
        period, rest = divmod((steps - stage.begin) * self.micro_batch_size, self.period)
        low, behind = stage.first_slot[source : source + 2]
        positions = self._cycle(number, period).position_of[low:behind]
        start = virtual_worker * self.micro_batch_size % self.period
        stop = start + rest
        passed = np.searchsorted(positions, stop % self.period) - np.searchsorted(positions, start)
        quota = stage.quotas[source]
        here = period * quota + passed + np.where(stop >= self.period, quota, 0)
        return np.asarray(stage.taken[source, virtual_worker] + here)

    def _lay_out(self, stage_number: int, period: int) -> _Cycle:
        """Place the slots of a period on its circle, in integers: an arc is measured in 2^-24
        slots.
        """
        stage = self._stages[stage_number]
        quota = np.repeat(stage.quotas, stage.quotas)
        slot = np.arange(self.period)
        # the slot's number within its source
        number = slot - np.repeat(stage.first_slot[:-1], stage.quotas)
        of_stage = (stage.begin,) if stage.begin else ()
        key = np.uint64(derive(_PERIOD, self.seed, period, *of_stage))
        chance = mix64_words(key ^ mix64_words(slot.astype(np.uint64)))
        arc = (self.period << 24) // quota
        inside = (chance % arc.astype(np.uint64)).astype(np.int64)
        slot_at = np.argsort(number * arc + inside, kind="stable")
        position_of = np.empty_like(slot_at)
        position_of[slot_at] = slot
        return _Cycle(slot_at, position_of)


def _quotas(weights: Sequence[float], period: int) -> tuple[int, ...]:
    """Return integers in proportion to the weights, at least 1 unless the weight is 0, with the sum
    `period`.
    """
    assert weights and min(weights) >= 0 and max(weights) > 0, "weights are checked by spec"
    total = sum(map(Fraction, weights))
    wanted = [Fraction(weight) * period / total for weight in weights]
    quotas = [max(1, int(share)) if share else 0 for share in wanted]
    while (missing := period - sum(quotas)) != 0:
        change = 1 if missing > 0 else -1
        free = [i for i, quota in enumerate(quotas) if wanted[i] and quota + change >= 1]
        quotas[max(free, key=lambda i: change * (wanted[i] - quotas[i]))] += change
    return tuple(quotas)


def _check_rows(sources: Sequence[MixtureSource]) -> None:
    for source in sources:
        if not np.sum(source.group_rows):
            raise DataError(f"{source.name} has no rows; leave this source out")
