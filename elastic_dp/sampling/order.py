"""The order of rows: (step, virtual worker) -> rows, a pure function of (seed, epoch, row groups).

The rows of an epoch are laid out in one *line*, each exactly once. Two things hold by construction:
every micro-batch is a set of positions on the line, and no two micro-batches of an epoch share a
position.

1. The line is cut into S *streams* of about equal length, each read from its start to its end: the
  part that a stream currently reads is one row group in memory.
2. A virtual worker has streams of its own (S a multiple of V), or several take turns at one (S <
  V). Either way the V virtual workers form *teams*; a team has G virtual workers and K streams, and
  one of the two numbers is 1. The team's rows are numbered as its members consume them, in turns of
  one micro-batch: row i of member g's turn t is number n = (t·G + g)·b + i. It is row n // K of the
  team's stream n % K. Lengths follow from the total alone, so row groups of unequal size need no
  special case: a cut may lie inside one.

When a virtual worker moves to another machine, that machine reads K row groups again. A row group
of a shared stream is read by every worker that runs a member of the team.

shuffle="none": the line is in file order, with one stream for the whole job: a global batch is V·b
consecutive rows.

shuffle="full" (for cheap random access): the same positions, mapped by one keyed permutation of all
rows.

shuffle="rows" (for streaming): reads must stay large, so rows move only within their row group. The
line is the row groups permuted by (seed, epoch), and in each stream the rows of a row group are
permuted. A global batch mixes S row groups; for the same memory, more streams mix better than
deeper blocks (measured). S is a function of the data alone, because the order must not depend on
the workers: 8·V if that many row groups of mean size fit into OPEN_BYTES, otherwise fewer. One
worker that runs the whole job must be able to hold them all.

The rows that do not fill the last global batch: tail="drop" leaves them out of every stream.
tail="short" adds one step, whose virtual workers are filled in order, so the last ones may have no
row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from elastic_dp.errors import DataError
from elastic_dp.sampling.epoch_order import EpochOrder, Ints, bounds_of
from elastic_dp.sampling.keyed_permutation import derive, permute
from elastic_dp.sampling.step_schedule import StepSchedule

STREAMS = 8  # per virtual worker, at most
# Stored bytes of the row groups that all streams have open together, some two times as many in
# memory; changes the order
OPEN_BYTES = 256 << 20
_ROWS = 4  # the purpose of a key; 1 to 3 are used by `EpochOrder`
_LINES_KEPT = 2  # of this epoch, and of the next one where they meet
# Rows of a virtual worker that are located together: each call of NumPy costs as much as for one.
# And of how many virtual workers they are kept.
_ROWS_TOGETHER, _LOCATED_KEPT = 512, 1024

Shuffle = Literal["none", "rows", "full"]
NOTHING: Ints = np.empty(0, dtype=np.int64)


class RowOrder(ABC):
    """An order of rows. Steps count from 1 and epochs from 0."""

    virtual_workers: int
    micro_batch_size: int
    num_rows: int
    # All parameters, besides the row groups, that determine the order; part of the fingerprint.
    identity: str
    steps_per_epoch: int

    def steps_of(self, epochs: int) -> int:
        """Return how many steps the first `epochs` epochs have together."""
        return epochs * self.steps_per_epoch

    def epoch_of(self, step: int) -> int:
        assert step >= 1, "steps count from 1"
        return (step - 1) // self.steps_per_epoch

    def ends_epoch(self, step: int) -> bool:
        return self.epoch_of(step + 1) > self.epoch_of(step)

    @abstractmethod
    def open_row_groups(self, virtual_workers: int) -> int:
        """Return how many row groups a worker with so many consecutive virtual workers reads at one
        time, at most."""

    @abstractmethod
    def rows(self, step: int, virtual_worker: int) -> int:
        """Return the number of rows of the micro-batch; 0 if a short step has none for it."""

    def locate(self, step: int, virtual_worker: int) -> Any:
        """Return the row groups and the rows in them, one pair per row of the micro-batch, in
        order; for packed rows `Segments`."""
        (located,) = self.locate_each(range(step, step + 1), virtual_worker)
        return located

    @abstractmethod
    def locate_each(self, steps: range, virtual_worker: int) -> list[Any]:
        """Like `locate`, for each step. Steps of an epoch together cost little more than one."""


class BaseOrder(RowOrder):
    """An order of its own, not one over the steps of another."""

    no_rows: Any  # what `locate` returns for a micro-batch without rows
    tail: Literal["drop", "short"] | None  # None: it has no end


class Order(BaseOrder):
    """The order of rows of one data set.

    `group_rows` is the number of rows of each row group, in file order. `group_bytes` is the number
    of stored bytes of each; None stands for small ones. `streams` is S. It holds 8 bytes per row
    group, and 16 more for each of up to two lines.

    Raises DataError if an epoch has no complete step.
    """

    no_rows = NOTHING, NOTHING

    def __init__(
        self,
        *,
        group_rows: npt.ArrayLike,
        virtual_workers: int,
        micro_batch_size: int,
        group_bytes: npt.ArrayLike | None = None,
        open_bytes: int = OPEN_BYTES,
        seed: int = 0,
        shuffle: Shuffle = "rows",
        tail: Literal["drop", "short"] = "drop",
    ) -> None:
        self._group_rows: Ints = np.asarray(group_rows, dtype=np.int64)
        self.num_rows = int(self._group_rows.sum())
        self.virtual_workers, self.micro_batch_size = virtual_workers, micro_batch_size
        self.seed, self.shuffle, self.tail = seed, shuffle, tail
        whole = virtual_workers * micro_batch_size
        self.steps_per_epoch = self.num_rows // whole
        if tail == "short":
            self.steps_per_epoch = -(-self.num_rows // whole)
        self._check_rows()
        # Steps that are located together. The order of each epoch takes time of its own.
        self._together = max(1, min(_ROWS_TOGETHER // micro_batch_size, self.steps_per_epoch))
        self.streams = 1
        if shuffle == "rows":
            self.streams = _count_streams(virtual_workers, group_bytes, open_bytes)
        else:
            self._file_bounds = bounds_of(self._group_rows)
        self.identity = (
            f"order 2 seed={seed} b={micro_batch_size} V={virtual_workers} "
            f"shuffle={shuffle} tail={tail} streams={self.streams}"
        )
        self._line = lru_cache(_LINES_KEPT)(self._lay_out)
        self._located = lru_cache(_LOCATED_KEPT)(self._locate_some)

    def open_row_groups(self, virtual_workers: int) -> int:
        """Where a stream goes from one row group to the next, a step needs both."""
        if self.shuffle == "full":
            return len(self._group_rows)
        smallest_team = self.virtual_workers // self._teams
        # it may begin with the last of a team
        teams = 1 + -(-(virtual_workers - 1) // smallest_team)
        return min(teams, self._teams) * self._streams_per_team

    def rows(self, step: int, virtual_worker: int) -> int:
        taken = (step - 1) % self.steps_per_epoch * self.micro_batch_size
        return min(max(self.share(virtual_worker) - taken, 0), self.micro_batch_size)

    def share(self, virtual_worker: int) -> int:
        """Return how many rows of an epoch the virtual worker consumes."""
        return self._start(virtual_worker + 1) - self._start(virtual_worker)

    def locate(self, step: int, virtual_worker: int) -> tuple[Ints, Ints]:
        turn, at = divmod(step - 1, self._together)
        return self._located(turn, virtual_worker)[at]

    def _locate_some(self, turn: int, virtual_worker: int) -> list[tuple[Ints, Ints]]:
        first = turn * self._together + 1
        return self.locate_each(range(first, first + self._together), virtual_worker)

    def locate_each(self, steps: range, virtual_worker: int) -> list[tuple[Ints, Ints]]:
        assert 0 <= virtual_worker < self.virtual_workers, "no such virtual worker"
        found, b = list[tuple[Ints, Ints]](), self.micro_batch_size
        for epoch, count, index in self.by_epoch(steps, virtual_worker):
            groups, rows = self.locate_in_share(epoch, virtual_worker, index)
            found += [(groups[at : at + b], rows[at : at + b]) for at in range(0, count * b, b)]
        return found

    def by_epoch(self, steps: range, virtual_worker: int) -> Iterator[tuple[int, int, Ints]]:
        """Yield (epoch, how many of the steps it has, their rows in the virtual worker's share)."""
        step, b = steps.start, self.micro_batch_size
        while step < steps.stop:
            epoch, first = self.epoch_of(step), (step - 1) % self.steps_per_epoch
            count = min(steps.stop - step, self.steps_per_epoch - first)
            stop = min((first + count) * b, self.share(virtual_worker))
            yield epoch, count, np.arange(min(first * b, stop), stop, dtype=np.int64)
            step += count

    def locate_in_share(self, epoch: int, virtual_worker: int, index: Ints) -> tuple[Ints, Ints]:
        """Like `locate`, for rows of the virtual worker's share; `index` counts them from 0 in its
        order.
        """
        position, low, high = self.positions(virtual_worker, index)
        if self.shuffle == "rows":
            return self._line(epoch).locate(position, low, high)
        if self.shuffle == "full":
            position = self.permuted(epoch, position)
        group = np.searchsorted(self._file_bounds, position, side="right") - 1
        return group, position - self._file_bounds[group]

    def permuted(self, epoch: int, position: Ints) -> Ints:
        """Return the positions that shuffle="full" maps these to."""
        key = np.uint64(derive(_ROWS, self.seed, epoch))
        return permute(position, np.uint64(self.num_rows), key)

    def positions(self, virtual_worker: int, index: Ints) -> tuple[Ints, Ints, Ints]:
        """Return positions on the line, and the stream of each position as `low`…`high` - 1."""
        first, behind = self._team(virtual_worker)
        turn, inside = _divided(index, self.micro_batch_size)
        turn = turn * (behind - first) + virtual_worker - first
        number = turn * self.micro_batch_size + inside
        depth, stream = _divided(number, self._streams_per_team)

        start = self._start(first)
        short, longer = divmod(self._start(behind) - start, self._streams_per_team)
        # `longer` streams have one row more.
        low = start + stream * short + np.minimum(stream, longer)
        return low + depth, low, low + short + (stream < longer)

    def _team(self, virtual_worker: int) -> tuple[int, int]:
        """Return the first virtual worker of the team, and the one after its last.

        The sizes of teams differ by at most one.
        """
        total, teams = self.virtual_workers, self._teams
        team = ((virtual_worker + 1) * teams - 1) // total
        return team * total // teams, (team + 1) * total // teams

    @property
    def _teams(self) -> int:
        return min(self.virtual_workers, self.streams)

    @property
    def _streams_per_team(self) -> int:
        return self.streams // self._teams

    def _start(self, virtual_worker: int) -> int:
        """Return how many rows of an epoch the virtual workers before this one consume."""
        steps, rest = divmod(self.num_rows, self.virtual_workers * self.micro_batch_size)
        full = virtual_worker * steps * self.micro_batch_size
        if self.tail == "drop":
            return full
        return full + min(virtual_worker * self.micro_batch_size, rest)

    def _lay_out(self, epoch: int) -> EpochOrder:
        return EpochOrder(self._group_rows, seed=self.seed, epoch=epoch)

    def _check_rows(self) -> None:
        if self.steps_per_epoch == 0:
            need = self.virtual_workers * self.micro_batch_size
            way_out = "" if self.num_rows == 0 else ', or set tail="short" for a smaller last batch'
            raise DataError(
                f"the data set has {self.num_rows} rows, fewer than one global batch of {need} "
                f"(micro_batch_size {self.micro_batch_size} × {self.virtual_workers} micro-batches,"
                " one for each virtual worker and inner step); add rows, or lower "
                f"micro_batch_size, virtual_workers or inner_steps{way_out}"
            )


def _divided(numbers: Ints, by: int) -> tuple[Ints, Ints]:
    """Like `np.divmod`, in a fraction of its time."""
    quotients = numbers // by
    return quotients, numbers - quotients * by


def _count_streams(virtual_workers: int, group_bytes: npt.ArrayLike | None, open_bytes: int) -> int:
    """Return S, from the mean size of a row group: a multiple of V, or less than V."""
    most = STREAMS * virtual_workers
    if group_bytes is None:
        return most
    sizes = np.asarray(group_bytes, dtype=np.int64)
    fit = open_bytes * len(sizes) // max(int(sizes.sum()), 1)
    if fit < virtual_workers:
        return max(fit, 1)
    return min(fit // virtual_workers * virtual_workers, most)


def with_steps(
    order: BaseOrder, schedule: StepSchedule, left_out: Sequence[tuple[int, int]]
) -> RowOrder:
    """Return `order` with the steps of a job: of sizes that change, if they do in `schedule`, and
    without those `left_out`, which are pairs of the first and the last one, each counted in the
    order that the pairs before it leave.
    """
    found: RowOrder = order
    if len(schedule.numbers) > 1:
        from elastic_dp.sampling.growing_order import GrowingOrder

        found = GrowingOrder(order, schedule)
    for first, last in left_out:
        from elastic_dp.sampling.leaving_out import LeavingOut

        found = LeavingOut(found, first, last)
    return found


def base_of(order: Any) -> Any:
    """Return the order without growth, and without steps that are left out."""
    while hasattr(order, "base"):
        order = order.base
    return order


def row_groups_at_once(order: RowOrder) -> int:
    """Return how many row groups a worker that runs the whole job has in memory.

    While one replaces another, all others stay.
    """
    return order.open_row_groups(order.virtual_workers) + 1


def row_groups_at_least(order: RowOrder) -> int:
    """Return the least number of row groups that need memory; with less they would be read
    repeatedly.

    If only one is open, the next can wait until it is released.
    """
    return count if (count := row_groups_at_once(order)) > 2 else 1
