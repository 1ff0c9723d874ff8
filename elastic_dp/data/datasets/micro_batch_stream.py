"""Data sets by (step, virtual worker): what all kinds have in common, and rows of shards.

The order (`sampling/`) says which rows a micro-batch has. `pipeline` reads row groups in the order
in which they are needed, and assembles micro-batches a few steps ahead. `batch` returns one, and
runs the part of the user's code that must run in the caller's thread: what may draw from global
generators (`transform(batch)`, `collate_fn`, `__getitem__`), which that thread has seeded for
(step, virtual worker). With `workers`, that part runs ahead too, in other processes, which seed
them in the same way. `transform(batch, rng)` runs ahead, in threads, and must not keep state
between calls.

Row groups that cannot be decoded, and rows whose image cannot be: without max_bad_fraction, `batch`
raises BadShard or UserCodeError. With it, `batch` leaves out these rows, so it has `masked` rows
fewer than `rows` says. A worker reports what it found by `bad_row_groups`; `mark_bad` gives each
worker those on which all have agreed. So all workers leave out the same rows. `check_bad` and
`check_left_out` raise if these are too many: at the same step whatever the number of workers. Bad
rows are numbered by their place in the data set + the number of row groups.
"""

from __future__ import annotations

import copy
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from elastic_dp.config import DataConfig, MapStyleData
from elastic_dp.data.discovery.shard_index import Index
from elastic_dp.data.pipeline.array_memory import BlockPool
from elastic_dp.data.pipeline.batch_assembler import BatchAssembler, Ints, distinct
from elastic_dp.data.pipeline.block_memory import Columns
from elastic_dp.data.pipeline.collation import Collator, located, nbytes_of, pinned
from elastic_dp.data.pipeline.pipeline import Assembly, Pipeline
from elastic_dp.data.pipeline.planner import STEPS_AHEAD, MicroBatch
from elastic_dp.data.pipeline.row_groups import RowGroups, largest_bytes
from elastic_dp.device.global_generators import seed_everything
from elastic_dp.errors import DataError, UserCodeError
from elastic_dp.sampling.order import RowOrder, row_groups_at_once
from elastic_dp.sampling.seeds import batch_seed
from elastic_dp.storage import redact_url

if TYPE_CHECKING:
    from elastic_dp.data.pipeline.user_code_process import UserCodeProcess

ASSEMBLERS = 2  # threads that make micro-batches, unless user code runs in processes
AHEAD_PART = 8  # 1 / AHEAD_PART of the memory is for micro-batches that are made ahead
# 1 / SLACK_PART of the memory is for what Arrow's allocator keeps in addition to row groups: 50 MiB
# for 220 MiB in row groups of 1 to 5 MiB.
SLACK_PART = 6
_LISTED_STEPS = 10_000
ROWS_AT_ONCE, BYTES_AT_ONCE = 4096, 32 << 20  # limits of a chunk of micro-batches


class MicroBatchStream(ABC):
    """Training data: shards at a URL, or a map-style dataset. Steps are counted from 1, epochs and
    virtual workers from 0. It is also the `MicroBatchSource` of its pipeline (see pipeline.py),
    which a subclass sets.

    `rows`, `epoch_of`, `ends_epoch`, `describe` and `masked` do no I/O.
    """

    index: Index | None = None  # for `open_data` in another process; None: map-style, pickled whole
    last_step: int | None = None  # nothing is read ahead for later steps
    # equal for data sets that have the same rows in each step, if their batches grow alike
    fingerprint: str
    num_rows: int
    steps_per_epoch: int  # at least 1; of the first epoch, where the batch grows
    _pipeline: Pipeline

    def __init__(
        self, config: DataConfig | MapStyleData, order: RowOrder, *, workers: int, pin: bool
    ) -> None:
        self._config, self._pin = config, pin
        self._order: Any = order  # packed rows are located by segments, others by rows
        self.num_rows, self.steps_per_epoch = order.num_rows, order.steps_per_epoch
        self._processes = _new_processes(workers) if workers else []

    @property
    def counts(self) -> dict[str, float]:
        """Counters since the start: `waited_s`, the seconds in `batch` without user code in the
        caller's thread; for shards also `row_groups_read`, `row_groups_read_again`, `requests`,
        `retries`, `bytes_read` of the store, `bytes_from_cache`."""
        return {"waited_s": self._pipeline.outbox.waited_s}

    def steps_of(self, epochs: int) -> int:
        """The number of steps of the first `epochs` epochs together."""
        return self._order.steps_of(epochs)

    def epoch_of(self, step: int) -> int:
        return self._order.epoch_of(step)

    def ends_epoch(self, step: int) -> bool:
        return self._order.ends_epoch(step)

    def rows(self, step: int, virtual_worker: int) -> int:
        """The number of rows of the micro-batch, with rows that cannot be decoded. With
        tail="short" the last step of an epoch may have fewer rows than others, or 0."""
        return self._order.rows(step, virtual_worker)

    def masked(self, step: int, virtual_worker: int) -> int:
        """The number of its rows that are known to be bad, or lie in bad row groups. Exact once
        `batch` has returned the micro-batch."""
        return 0

    def bad_row_groups(self, step: int, virtual_worker: int) -> frozenset[int]:
        """The bad row groups of the micro-batch, once `batch` has returned it. Row groups that were
        found to be bad while reading ahead are not among them, so that the result does not depend
        on how far ahead a worker reads."""
        return frozenset()

    def check_bad(self, row_groups: Iterable[int]) -> None:
        """Raises DataError if these row groups have more rows than may be left out."""
        assert not list(row_groups), "none can be bad"

    def check_left_out(self, rows: int) -> None:
        """Raises DataError if an evaluation of all rows must not leave out so many `rows`."""
        assert not rows, "none can be bad"

    def mark_bad(self, row_groups: Iterable[int]) -> None:
        """From the next `batch` on, leaves out their rows, also in micro-batches made ahead."""
        assert not list(row_groups), "none can be bad"

    def describe_row_group(self, row_group: int) -> str:
        """A name for messages. Example: "row group 3 of part-00003.parquet"; of a row, "row 17 of
        part-00003.parquet"."""
        raise AssertionError("there are no row groups")

    @abstractmethod
    def describe(self, step: int, virtual_worker: int) -> str:
        """What the micro-batch consists of, for error messages."""

    def left_out(self) -> Iterator[str]:
        """What each micro-batch of the steps that are left out consists of, the last stretch
        first, and of each at most `_LISTED_STEPS`."""
        from elastic_dp.sampling.leaving_out import LeavingOut

        view = copy.copy(self)
        while isinstance(order := view._order, LeavingOut):
            view._order = order.base
            last = min(order.last, order.first + _LISTED_STEPS - 1)
            if last < order.last:
                yield f"steps {last + 1} to {order.last}: too many to list"
            for step in range(order.first, last + 1):
                for v in range(order.virtual_workers):
                    yield f"step {step}, virtual worker {v}: {view.describe(step, v)}"

    def read_ahead(self, step: int, virtual_workers: Sequence[int]) -> None:
        """A hint: from `step` on, this worker runs these. Calling it again moves it, and keeps what
        is here of those that stay; `batch` works without."""
        self._start_processes()
        self._pipeline.read_ahead(step, virtual_workers)

    def batch(self, step: int, virtual_worker: int) -> Any:
        """A dict of CPU tensors [rows, …] that own their memory, or what `collate_fn` returns; None
        if all rows are masked. For any step, in any order, and any number of times: the result does
        not depend on what was read ahead. Must not be called for a micro-batch of 0 rows. Raises
        UserCodeError, with step and rows, for an exception in user code; StorageError; BadShard;
        DataError."""
        self._start_processes()
        try:
            made = self._pipeline.take(step, virtual_worker)
            return made if made is None or self._processes else self._late(made)
        except UserCodeError as error:
            where = self.describe(step, virtual_worker)
            raise located(error, step, virtual_worker, where) from error.__cause__

    def close(self) -> None:
        self._pipeline.close()
        for process in self._processes:
            process.end()
        self._pipeline.join()
        for process in self._processes:
            process.close()

    def in_process(self, wanted: MicroBatch, number: int, content: Any) -> Any:
        """What the callable of the processes makes of the content of a micro-batch."""
        return self._processes[number].run(content, *wanted.slot)

    def _start_processes(self) -> None:
        if self._processes and self._processes[0].pid is None:
            from elastic_dp.module_pickling import pickle_with_modules

            name = type(self._config).__name__
            pickled = pickle_with_modules(self._call(), f"{name}, whose functions have workers,")
            for process in self._processes:
                process.start(pickled)

    @abstractmethod
    def _call(self) -> Callable[..., Any]:
        """The callable that the processes run."""

    def _late(self, made: Any) -> Any:
        """What the caller's thread does with a micro-batch, where there are no processes."""
        return made

    # ------------------------------------------------- what micro-batches are made of

    @abstractmethod
    def locate(self, steps: range, virtual_worker: int) -> list[tuple[Any, int]]: ...

    def parts(self, before: Any, after: Any) -> bool:
        return False

    def row_groups(self, works: Sequence[Any]) -> Sequence[int]:
        """The row groups of a work are its first element."""
        found: list[int] = distinct(np.concatenate([groups for groups, *_ in works])).tolist()
        return found

    def changes(self, works: Sequence[Any], content: Any) -> bool:
        return False

    @abstractmethod
    def assembly(self, wanted: Sequence[MicroBatch]) -> Assembly: ...


def _new_processes(count: int) -> list[UserCodeProcess]:
    from elastic_dp.data.pipeline.user_code_process import UserCodeProcess

    return [UserCodeProcess(f"data process {number + 1} of {count}") for number in range(count)]


class Evaluation:
    """All rows once, in file order, the last batch shorter: the only epoch of a stream of one
    virtual worker. `seed`, `epochs`, `shuffle` and `tail` do not matter. User code never runs in
    other processes: its random numbers are those of the thread that calls `batch`.
    """

    def __init__(self, stream: MicroBatchStream) -> None:
        self._stream, self.index = stream, stream.index
        self.fingerprint, self.num_rows = stream.fingerprint, stream.num_rows
        self.num_batches = stream.steps_per_epoch
        self.mark_bad, self.describe_row_group = stream.mark_bad, stream.describe_row_group
        self.check_left_out, self.close = stream.check_left_out, stream.close
        stream.last_step = 0

    def rows(self, index: int) -> int:
        return self._stream.rows(index + 1, 0)

    def masked(self, index: int) -> int:
        return self._stream.masked(index + 1, 0)

    def batch(self, index: int) -> Any:
        assert 0 <= index < self.num_batches, "no such batch"
        return self._stream.batch(index + 1, 0)

    def describe(self, index: int) -> str:
        return self._stream.describe(index + 1, 0)

    def read_ahead(self, indices: Sequence[int]) -> None:
        """A hint: `batch` will be called for these, in this order."""
        if indices:
            self._stream.last_step = max(indices) + 1
            self._stream.read_ahead(min(indices) + 1, [0])


# ------------------------------------------------------------------------------------- shards


@dataclass(frozen=True, slots=True)
class _StreamCall:
    """The callable that a data process runs: user code with the generators of one micro-batch."""

    collator: Collator
    seed: int

    def __call__(self, arrays: Any, step: int, virtual_worker: int) -> tuple[Any, list[int]]:
        """(the micro-batch, the indices of its rows that are left out: see `Collator.decode`)."""
        arrays, bad = self.collator.decode(arrays)
        if arrays is None:
            return None, bad
        seed_everything(batch_seed(self.seed, step, virtual_worker))
        return self.collator.late(self.collator.early(arrays, step, virtual_worker)), bad


class ShardStream(MicroBatchStream):
    """Micro-batches of row groups.

    `row_bytes`: of a row of a micro-batch, about. `copy_bytes`: of what is made of a row group
    before that is dropped. `evaluation`: user code never runs in other processes, and row groups
    stay in memory while there is room: `batch` may be called without `read_ahead`, and evaluations
    are repeated.
    """

    _config: DataConfig

    def __init__(
        self,
        config: DataConfig,
        row_groups: RowGroups,
        order: RowOrder,
        *,
        row_bytes: int,
        copy_bytes: int = 0,
        evaluation: bool = False,
        pin: bool = False,
    ) -> None:
        collator = Collator(config)
        needs_processes = collator.has_user_code or collator.decodes
        workers = config.workers if needs_processes and not evaluation else 0
        super().__init__(config, order, workers=workers, pin=pin)
        self._collator = Collator(config, pin=pin and not workers)
        self.index, self._row_groups = row_groups.index, row_groups
        digest = "" if self.index is None else self.index.digest
        identity = f"{'evaluation ' if evaluation else ''}{digest} {order.identity}"
        self.fingerprint = hashlib.sha256(identity.encode()).hexdigest()
        self._row_ends = np.cumsum(row_groups.rows)  # by row group
        self._blocks = BlockPool(STEPS_AHEAD)
        opened = 1 if evaluation else row_groups_at_once(order)
        one_more = int(row_groups.reading_bytes.max() + row_groups.nbytes.max())
        floor = max(largest_bytes(row_groups, opened), one_more)
        spare = max(0, config.memory_bytes - floor)
        copy_bytes = min(copy_bytes, spare)
        spare -= copy_bytes
        ahead = min(config.memory_bytes // AHEAD_PART, spare)
        slack = min(config.memory_bytes // SLACK_PART, spare - ahead)
        self._pipeline = Pipeline(
            self,
            row_groups,
            micro_batch_size=config.micro_batch_size,
            ahead_bytes=ahead,
            rows_at_once=0 if workers or collator.makes_alone else _rows_in(row_bytes, ahead),
            assemblers=workers or ASSEMBLERS,
            memory_bytes=config.memory_bytes - ahead - slack - copy_bytes,
            keep=evaluation or config.shuffle == "full",
            skip_bad=config.max_bad_fraction > 0,
        )
        if config.epochs is not None:
            self.last_step = order.steps_of(config.epochs)

    @property
    def counts(self) -> dict[str, float]:
        return {
            **super().counts,
            "row_groups_read": self._pipeline.groups_read,
            "row_groups_read_again": self._pipeline.memory.evicted,
            **self._row_groups.counts,
        }

    def mark_bad(self, row_groups: Iterable[int]) -> None:
        self._pipeline.mark_bad(set(row_groups))

    def describe_row_group(self, row_group: int) -> str:
        if (row := row_group - len(self._row_ends)) >= 0:
            group = int(np.searchsorted(self._row_ends, row, side="right"))
            shard, _, first = self._row_groups.name(group)
            in_group = row - int(self._row_ends[group] - self._row_groups.rows[group])
            return f"row {first + in_group} of {shard}"
        shard, number, _ = self._row_groups.name(row_group)
        return f"row group {number} of {shard}"

    def finished(
        self, arrays: dict[str, Any] | None, wanted: MicroBatch, producer: int
    ) -> tuple[Any, list[int]]:
        """(the micro-batch, the indices of rows that are left out)."""
        if arrays is None:
            return None, []
        if self._processes:
            made, bad = self.in_process(wanted, producer, arrays)
            return (pinned(made) if self._pin else made), bad
        arrays, bad = self._collator.decode(arrays)
        return None if arrays is None else self._collator.early(arrays, *wanted.slot), bad

    def _call(self) -> _StreamCall:
        return _StreamCall(self._collator, self._config.seed)

    def _late(self, made: Any) -> Any:
        return self._collator.late(made)

    # ------------------------------------------------------- the limit of rows that are left out

    def check_bad(self, row_groups: Iterable[int]) -> None:
        """The limit holds for the rows on which all workers have agreed, so a run fails at the same
        step whatever the number of workers. It is that of the data set, or of each source that has
        a weight."""
        bad, rows = sorted(row_groups), self._row_groups.rows
        parts = [(0, len(rows), "the data set")]
        if self.index is not None and self.index.weights is not None:
            parts = [
                (source.first_group, source.end_group, f"the source {redact_url(url)!r}")
                for url, source in zip(self._config.urls, self.index.sources, strict=True)
            ]
        single = np.array([number - len(rows) for number in bad if number >= len(rows)], np.int64)
        groups = np.searchsorted(self._row_ends, single, side="right")
        groups = groups[~np.isin(groups, bad)]  # the other rows count with their row group
        for first, end, what in parts:
            of_part = [number for number in bad if first <= number < end]
            named = [self._row_groups.name(number) for number in of_part[:_BAD_NAMED]]
            some = ", ".join(f"row group {number} of {shard}" for shard, number, _ in named)
            more = ", …" if len(of_part) > len(named) else ""
            left_out = int(rows[of_part].sum() + ((first <= groups) & (groups < end)).sum())
            names = f": {some}{more}" if some else ""
            self._check_rows(left_out, int(rows[first:end].sum()), what, names)

    def check_left_out(self, rows: int) -> None:
        self._check_rows(rows, self.num_rows, "the evaluation", "")

    def _check_rows(self, left_out: int, rows: int, what: str, names: str) -> None:
        if not left_out:
            return
        if left_out == rows:
            raise DataError(
                f"DataConfig.url: no row of {what} can be decoded{names}. Nothing is left to "
                "read; repair the shards"
            )
        if left_out > self._config.max_bad_fraction * rows:
            raise DataError(
                f"DataConfig.max_bad_fraction is {self._config.max_bad_fraction:g}, but "
                f"{left_out:,} of the {rows:,} rows of {what}, {left_out / rows:.2g} of them, "
                f"cannot be decoded{names}. Repair or remove the shards; or raise "
                "max_bad_fraction, if these rows are not needed"
            )


def _rows_in(row_bytes: int, ahead_bytes: int) -> int:
    """The limit of rows of a chunk."""
    return min(ROWS_AT_ONCE, min(BYTES_AT_ONCE, ahead_bytes // STEPS_AHEAD) // row_bytes)


_ROWS_NAMED = 8  # in an error message, of one shard
_SHARDS_NAMED = _BAD_NAMED = 3

Located = tuple[Ints, Ints]  # row groups, rows in them


class RowStream(ShardStream):
    def __init__(
        self, config: DataConfig, row_groups: RowGroups, order: RowOrder, **options: Any
    ) -> None:
        row_bytes = int(row_groups.nbytes.sum()) // max(1, int(row_groups.rows.sum()))
        super().__init__(config, row_groups, order, row_bytes=max(1, row_bytes), **options)
        self._in_file_order = config.shuffle == "none"

    def masked(self, step: int, virtual_worker: int) -> int:
        if not (bad := [*self._pipeline.bad]):
            return 0
        groups, rows = self._order.locate(step, virtual_worker)
        return int((np.isin(groups, bad) | np.isin(self.numbers(groups, rows), bad)).sum())

    def bad_row_groups(self, step: int, virtual_worker: int) -> frozenset[int]:
        if not (bad := self._pipeline.bad):
            return frozenset()
        groups, rows = self._order.locate(step, virtual_worker)
        numbers = self.numbers(groups, rows)
        return bad.intersection([*groups.tolist(), *numbers.tolist()])

    def numbers(self, groups: Ints, rows: Ints) -> Ints:
        """The numbers of rows, as `Pipeline.bad` has them."""
        first: Ints = self._row_ends[groups] - self._row_groups.rows[groups]
        return len(self._row_ends) + first + rows

    def describe(self, step: int, virtual_worker: int) -> str:
        """Example: "rows 17, 93 of part-0.parquet; rows 5, 6, … of part-1.parquet". Rows are
        counted in the shard, from 0."""
        groups, rows = self._order.locate(step, virtual_worker)
        return rows_named(self._row_groups, groups, rows, self._config)

    def locate(self, steps: range, virtual_worker: int) -> list[tuple[Any, int]]:
        each = self._order.locate_each(steps, virtual_worker)
        return [((groups, rows), len(rows)) for groups, rows in each]

    def parts(self, before: Located, after: Located) -> bool:
        """Whether a row group ends between the two: a row group in one chunk need not be copied."""
        return self._in_file_order and before[0][0] != after[0][0]

    def assembly(self, wanted: Sequence[MicroBatch]) -> RowAssembly:
        return RowAssembly(self, wanted, self._blocks)


class RowAssembly:
    def __init__(self, stream: RowStream, wanted: Sequence[MicroBatch], blocks: BlockPool) -> None:
        self._stream, self._wanted = stream, wanted
        self._groups = np.concatenate([m.work[0] for m in wanted])
        self._rows = np.concatenate([m.work[1] for m in wanted])
        self._bounds = [0, *np.cumsum([m.rows for m in wanted]).tolist()]
        # A single micro-batch may go through user code, and counts with the bytes of its result.
        bounds = self._bounds if len(wanted) > 1 else []
        self._assembler = BatchAssembler(self._groups, self._rows, blocks, bounds)

    def copy(self, contents: dict[int, Columns | None], may_keep: Mapping[int, int]) -> None:
        for row_group, columns in contents.items():
            assert columns is not None
            if self._assembler.copy(row_group, columns, may_keep.get(row_group, 0)):
                contents[row_group] = None

    def finish(
        self, left_out: set[int], failed: Mapping[int, Exception], producer: int
    ) -> tuple[list[Any], int, list[int]]:
        self._assembler.left_out = list(left_out)
        made, bad = list[Any](), list[int]()
        for m, (start, stop) in zip(self._wanted, pairwise(self._bounds), strict=True):
            groups = self._groups[start:stop]
            needed = failed and set(groups.tolist()) & failed.keys()
            if needed:
                made.append(failed[min(needed)])
                continue
            one, at = self._stream.finished(self._assembler.cut(start, stop), m, producer)
            made.append(one)
            if at:
                kept = start + np.flatnonzero(~np.isin(groups, self._assembler.left_out))
                numbers = self._stream.numbers(self._groups[kept], self._rows[kept])
                bad += numbers[at].tolist()
        several = len(self._wanted) > 1
        return made, self._assembler.nbytes if several else nbytes_of(made[0]), bad


def rows_named(row_groups: RowGroups, groups: Ints, rows: Ints, config: DataConfig) -> str:
    by_shard: dict[str, list[int]] = {}
    for group, row in zip(groups.tolist(), rows.tolist(), strict=True):
        shard, _, first = row_groups.name(group)
        by_shard.setdefault(shard, []).append(first + row)
    parts = []
    for name, numbers in list(by_shard.items())[:_SHARDS_NAMED]:
        more = ", …" if len(numbers) > _ROWS_NAMED else ""
        parts.append(f"rows {', '.join(map(str, numbers[:_ROWS_NAMED]))}{more} of {name}")
    if len(by_shard) > _SHARDS_NAMED:
        parts.append(f"and of {len(by_shard) - _SHARDS_NAMED} more shards")
    counted = " (counting those that the filter keeps)" if config.filter is not None else ""
    return f"{'; '.join(parts)}{counted}" if parts else "no rows"
