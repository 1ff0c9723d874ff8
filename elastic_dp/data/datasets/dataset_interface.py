"""The interfaces of data sets that `train/` uses. There are two implementations: shards at a URL,
and map-style datasets.

Three things hold for both:

- `rows`, `epoch_of`, `ends_epoch`, `describe` and `masked` do no I/O.
- `batch` may be called for any step, in any order, and any number of times. Its result does not
  depend on what was read ahead.
- User code that may draw from global generators (`transform(batch)`, `collate_fn`, `__getitem__`)
  runs in `batch`, in the calling thread, which has seeded them for (step, virtual worker). With
  `workers` it runs in a process that seeds them in the same way. `transform(batch, rng)` runs
  ahead, in threads, and must not keep state between calls.

Row groups that cannot be decoded, and rows whose image cannot be: without max_bad_fraction, `batch`
raises BadShard or UserCodeError. With it, `batch` leaves out these rows, so it has `masked` rows
fewer than `rows` says. A worker reports what it found by `bad_row_groups`; `mark_bad` gives
each worker those on which all have agreed. So all workers leave out the same rows. `check_bad` and
`check_left_out` raise if these are too many: at the same step whatever the number of workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from elastic_dp.data.discovery.shard_index import Index


class BadRowGroups(Protocol):
    """Bad row groups, by their number in the index, and bad rows, by their number in the data set +
    the number of row groups: the same ones on all workers."""

    def mark_bad(self, row_groups: Iterable[int]) -> None:
        """From the next `batch` on, leaves out their rows, also in micro-batches made ahead."""

    def describe_row_group(self, row_group: int) -> str:
        """A name for messages. Example: "row group 3 of part-00003.parquet"; of a row, "row
        17 of part-00003.parquet"."""


class Dataset(BadRowGroups, Protocol):
    """Training data. Steps are counted from 1, epochs and virtual workers from 0."""

    index: Index | None  # for `open_data` in another process; None: map-style, pickled whole
    # equal for data sets that have the same rows in each step, if their batches grow alike
    fingerprint: str
    num_rows: int
    steps_per_epoch: int  # at least 1; of the first epoch, where the batch grows

    @property
    def counts(self) -> dict[str, float]:
        """Counters since the start: `waited_s`, the seconds in `batch` without user code in the
        caller's thread; for shards also `row_groups_read`, `row_groups_read_again`, `requests`,
        `retries`, `bytes_read` of the store, `bytes_from_cache`."""

    def steps_of(self, epochs: int) -> int:
        """The number of steps of the first `epochs` epochs together."""

    def epoch_of(self, step: int) -> int: ...

    def ends_epoch(self, step: int) -> bool: ...

    def rows(self, step: int, virtual_worker: int) -> int:
        """The number of rows of the micro-batch, with rows that cannot be decoded. With
        tail="short" the last step of an epoch may have fewer rows than others, or 0."""

    def masked(self, step: int, virtual_worker: int) -> int:
        """The number of its rows that are known to be bad, or lie in bad row groups. Exact once
        `batch` has returned the micro-batch."""

    def bad_row_groups(self, step: int, virtual_worker: int) -> frozenset[int]:
        """The bad row groups of the micro-batch, once `batch` has returned it. Row groups that were
        found to be bad while reading ahead are not among them, so that the result does not depend
        on how far ahead a worker reads."""

    def check_bad(self, row_groups: Iterable[int]) -> None:
        """Raises DataError if these row groups have more rows than may be left out."""

    def batch(self, step: int, virtual_worker: int) -> Any:
        """A dict of CPU tensors [rows, …] that own their memory, or what `collate_fn` returns.

        None if all rows are masked. Must not be called for a micro-batch of 0 rows. Raises
        UserCodeError, with step and rows, for an exception in user code; StorageError; BadShard;
        DataError.
        """

    def describe(self, step: int, virtual_worker: int) -> str:
        """The rows, for error messages. Example: "rows 17, 93, … of part-00003.parquet"."""

    def read_ahead(self, step: int, virtual_workers: Sequence[int]) -> None:
        """A hint: from `step` on, this worker runs these. Calling it again moves it, and keeps what
        is here of those that stay; `batch` works without."""

    def close(self) -> None: ...


class EvaluationData(BadRowGroups, Protocol):
    """All rows once, in file order, the last batch shorter; `seed`, `epochs`, `shuffle`, `tail` do
    not matter.

    User code never runs in other processes: its random numbers are those of the thread that calls
    `batch`.
    """

    index: Index | None
    fingerprint: str
    num_rows: int
    num_batches: int

    def rows(self, index: int) -> int: ...

    def masked(self, index: int) -> int: ...

    def check_left_out(self, rows: int) -> None:
        """Raises DataError if an evaluation of all rows must not leave out so many `rows`."""

    def batch(self, index: int) -> Any:
        """Like `Dataset.batch`. None if all rows are masked."""

    def describe(self, index: int) -> str: ...

    def read_ahead(self, indices: Sequence[int]) -> None:
        """A hint: `batch` will be called for these, in this order."""

    def close(self) -> None: ...
