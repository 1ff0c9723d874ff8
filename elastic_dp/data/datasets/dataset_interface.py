"""What `train/` needs of a data set. Two kinds keep it: shards at a URL and map-style datasets.

Three things hold for both. `rows`, `epoch_of`, `ends_epoch`, `describe` and `masked` do no I/O.
`batch` may be called for any step, in any order, any number of times, and gives the same whatever
was read ahead. And where user code may draw from global generators (`transform(batch)`,
`collate_fn`, `__getitem__`), it either runs in `batch`, in the thread that called it, which has
seeded them for (step, virtual worker); or, with `workers`, in a process that seeds them in the same
way. `transform(batch, rng)` runs ahead, in threads: it must not keep state between calls.

A row group that cannot be decoded. With on_bad_shard="fail", `batch` raises its BadShard. With
"skip", `batch` leaves its rows out, so there may be fewer than `rows` says: `masked` fewer. What a
worker found in a micro-batch it tells the group by `bad_row_groups`; what the group has recorded it
hands to each worker by `mark_bad`, so that all leave out the same whatever each could read.
`check_bad` and `check_left_out` say when that is too much, of what all have agreed on: at the same
step in every fleet.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from elastic_dp.data.discovery.index import Index


class BadRowGroups(Protocol):
    """Row groups by their number in the index; they are the same on all workers."""

    def mark_bad(self, row_groups: Iterable[int]) -> None:
        """From the next `batch` on their rows are left out, also of what was made ahead."""

    def describe_row_group(self, row_group: int) -> str:
        """For messages. Example: "row group 3 of part-00003.parquet"."""


class Dataset(BadRowGroups, Protocol):
    """Training data. Steps count from 1, epochs from 0, virtual workers from 0."""

    index: Index | None  # for `open_data` in another process; None: map-style, pickled whole
    fingerprint: (
        str  # of the data set's shape and all that sets the order. Equal: same rows per step
    )
    num_rows: int
    steps_per_epoch: int  # at least 1

    @property
    def counts(self) -> dict[str, float]:
        """For telemetry, since the start: `waited_s` (time in `batch`, but for user code that runs
        in the caller's thread), and of shards `row_groups_read`, `row_groups_read_again`,
        `requests`, `retries`, `bytes_read`."""

    def epoch_of(self, step: int) -> int: ...

    def ends_epoch(self, step: int) -> bool: ...

    def rows(self, step: int, virtual_worker: int) -> int:
        """How many rows the micro-batch has. With tail="short" an epoch's last step may have fewer,
        or 0.

        Arithmetic: rows that cannot be decoded count.
        """

    def masked(self, step: int, virtual_worker: int) -> int:
        """How many of them are known to lie in bad row groups. Right for a micro-batch once `batch`
        gave it."""

    def bad_row_groups(self, step: int, virtual_worker: int) -> frozenset[int]:
        """Those that the micro-batch has rows in; once `batch` gave it. What was found ahead of it
        is not among them, so that they do not depend on how far ahead each worker reads."""

    def check_bad(self, row_groups: Iterable[int]) -> None:
        """Raises DataError where so many rows must not be left out."""

    def batch(self, step: int, virtual_worker: int) -> Any:
        """A dict of CPU tensors [rows, …] that own their memory, or what `collate_fn` returns.

        None if no row is left but masked ones. Not to be asked for a micro-batch of 0 rows. Raises
        UserCodeError with step and rows for what user code raised, StorageError, BadShard,
        DataError.
        """

    def describe(self, step: int, virtual_worker: int) -> str:
        """For error messages. Example: "rows 17, 93, … of part-00003.parquet"."""

    def read_ahead(self, step: int, virtual_workers: Sequence[int]) -> None:
        """A hint: from `step` on, this worker runs these. Calling it again moves it, and keeps what
        is here of those that stay; `batch` works without."""

    def close(self) -> None: ...


class EvaluationData(BadRowGroups, Protocol):
    """All rows once, in file order, the last batch shorter; `seed`, `epochs`, `shuffle`, `tail` do
    not matter.

    User code never runs in processes: its random numbers are those of the thread that calls
    `batch`.
    """

    index: Index | None
    fingerprint: str
    num_rows: int
    num_batches: int

    def rows(self, index: int) -> int: ...

    def masked(self, index: int) -> int: ...

    def check_left_out(self, rows: int) -> None:
        """Of an evaluation of all rows. Raises DataError where so many must not be left out."""

    def batch(self, index: int) -> Any:
        """None if no row is left but masked ones."""

    def describe(self, index: int) -> str: ...

    def read_ahead(self, indices: Sequence[int]) -> None:
        """A hint: `batch` will be called for these, in this order."""

    def close(self) -> None: ...
