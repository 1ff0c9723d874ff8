"""What one process knows of the worker that it is a part of, and its micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from torch.distributed.device_mesh import DeviceMesh

from elastic_dp.train.generations.worker_control import WorkerControl
from elastic_dp.train.step.batch_source import BatchSource

_BY_VIRTUAL_WORKER = ("rows", "masked", "batch", "bad_row_groups")


@dataclass(frozen=True, slots=True)
class Gang:
    """The processes of one worker, over which `fully_shard` divides the model. Each has rows of its
    own. `number` is that of this process, from 0."""

    number: int
    size: int
    mesh: DeviceMesh
    control: WorkerControl
    helps_to_gather: bool = False  # the first process takes checkpoints

    def micro_batch(self, virtual_worker: int) -> int:
        """Returns the number of this process's micro-batch of a virtual worker."""
        return virtual_worker * self.size + self.number


def process_batches(data: BatchSource, gang: Gang) -> BatchSource:
    """Returns the micro-batches of one process. `data` is opened for N times as many virtual
    workers as the job has, where a worker has N processes: process i runs micro-batch v * N + i for
    virtual worker v."""
    return cast(BatchSource, _ProcessBatches(data, gang))


class _ProcessBatches:
    """`describe` takes the number of a micro-batch, the key of a result."""

    def __init__(self, data: BatchSource, gang: Gang) -> None:
        self._data, self._key = data, gang.micro_batch

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._data, name)
        return partial(self._of_process, found) if name in _BY_VIRTUAL_WORKER else found

    def _of_process(self, method: Any, step: int, virtual_worker: int) -> Any:
        return method(step, self._key(virtual_worker))

    def read_ahead(self, step: int, virtual_workers: Sequence[int]) -> None:
        self._data.read_ahead(step, [self._key(v) for v in virtual_workers])
