"""What `train/` needs of a data set. Two kinds keep it: Parquet shards and map-style datasets.

Three things hold for both. `rows`, `epoch_of`, `ends_epoch` and `describe` do no I/O. User code (`transform`,
`collate_fn`, `__getitem__`) runs only in `batch`, in the thread that called it: it draws from that thread's
random generators, so a caller that seeds them per (step, virtual worker) gets the same augmentation whenever
and wherever the micro-batch is made. And `batch` may be called for any step, in any order, any number of times.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from elastic_dp.data.manifest import Manifest


class Dataset(Protocol):
    """Training data. Steps count from 1, epochs from 0, virtual workers from 0."""

    manifest: Manifest | None  # for `open_data` in another process; None: map-style, pickled whole
    fingerprint: (
        str  # of the data set's shape and all that sets the order. Equal: same rows per step
    )
    num_rows: int
    steps_per_epoch: int  # at least 1

    def epoch_of(self, step: int) -> int: ...

    def ends_epoch(self, step: int) -> bool: ...

    def rows(self, step: int, virtual_worker: int) -> int:
        """How many rows the micro-batch has. With tail="short" an epoch's last step may have fewer, or 0."""

    def batch(self, step: int, virtual_worker: int) -> Any:
        """A dict of CPU tensors [rows, …] that own their memory, or what `collate_fn` returns.

        Not to be asked for a micro-batch of 0 rows.
        """

    def describe(self, step: int, virtual_worker: int) -> str:
        """For error messages. Example: "rows 17, 93, … of part-00003.parquet"."""

    def read_ahead(self, step: int, virtual_workers: Sequence[int]) -> None:
        """A hint: from `step` on, this worker runs these. Calling it again moves it; `batch` works without."""

    def close(self) -> None: ...


class EvaluationData(Protocol):
    """All rows once, in file order, the last batch shorter; `seed`, `epochs`, `shuffle`, `tail` do not matter."""

    manifest: Manifest | None
    fingerprint: str
    num_rows: int
    num_batches: int

    def rows(self, index: int) -> int: ...

    def batch(self, index: int) -> Any: ...

    def describe(self, index: int) -> str: ...

    def close(self) -> None: ...
