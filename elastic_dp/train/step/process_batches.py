"""The micro-batches of one process of a worker.

The data set is opened for N times as many virtual workers as the job has, where a worker has N
processes: process i runs micro-batch v * N + i for virtual worker v.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from elastic_dp.train.gang import Gang
from elastic_dp.train.step.batch_source import BatchSource


class ProcessBatches:
    """Implements `BatchSource` for one process."""

    def __init__(self, data: BatchSource, gang: Gang) -> None:
        self._data, self._key = data, gang.micro_batch
        self.fingerprint, self.steps_per_epoch = data.fingerprint, data.steps_per_epoch

    def steps_of(self, epochs: int) -> int:
        return self._data.steps_of(epochs)

    def epoch_of(self, step: int) -> int:
        return self._data.epoch_of(step)

    def ends_epoch(self, step: int) -> bool:
        return self._data.ends_epoch(step)

    def rows(self, step: int, virtual_worker: int) -> int:
        return self._data.rows(step, self._key(virtual_worker))

    def masked(self, step: int, virtual_worker: int) -> int:
        return self._data.masked(step, self._key(virtual_worker))

    def batch(self, step: int, virtual_worker: int) -> Any:
        return self._data.batch(step, self._key(virtual_worker))

    def describe(self, step: int, virtual_worker: int) -> str:
        """`virtual_worker` is the key of a result, so the number of a micro-batch."""
        return self._data.describe(step, virtual_worker)

    def read_ahead(self, step: int, virtual_workers: Sequence[int]) -> None:
        self._data.read_ahead(step, [self._key(v) for v in virtual_workers])

    def bad_row_groups(self, step: int, virtual_worker: int) -> frozenset[int]:
        return self._data.bad_row_groups(step, self._key(virtual_worker))

    def check_bad(self, row_groups: Iterable[int]) -> None:
        self._data.check_bad(row_groups)

    def mark_bad(self, row_groups: Iterable[int]) -> None:
        self._data.mark_bad(row_groups)

    def describe_row_group(self, row_group: int) -> str:
        return self._data.describe_row_group(row_group)
