"""A map-style `torch.utils.data.Dataset`, in the same computed order as shards.

Access is random, so rows are permuted freely. Items are fetched one by one, or all at once if the
dataset has `__getitems__`. `__getitem__` and `collate_fn` may draw from the global generators:
those of the thread that calls `batch`, or, with `workers`, those of processes that fetch ahead and
seed them in the same way. So both give the same items.
"""

from __future__ import annotations

import hashlib
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import default_collate

from elastic_dp.config import MapStyleData
from elastic_dp.data.discovery.shard_index import Index
from elastic_dp.data.pipeline.collation import aligned_tensors, located, nbytes_of, pinned
from elastic_dp.data.pipeline.global_generators import seed_everything
from elastic_dp.data.pipeline.micro_batch_plan import MicroBatch
from elastic_dp.data.pipeline.micro_batches import MicroBatches
from elastic_dp.data.pipeline.row_group_reader import Key
from elastic_dp.data.pipeline.user_code_process import UserCodeProcess
from elastic_dp.errors import DataError, UserCodeError
from elastic_dp.module_pickling import pickle_with_modules
from elastic_dp.sampling import GrowingOrder, Order, StepSchedule, batch_seed

Ints = npt.NDArray[np.int64]

AHEAD_BYTES = 1 << 30  # limit of micro-batches that processes make ahead
_ROWS_NAMED = 8


class _NoRowGroups:
    """A data set without row groups, so that none can be bad."""

    index: Index | None = None

    def mark_bad(self, row_groups: Iterable[int]) -> None:
        assert not list(row_groups), "map-style data has no row groups"

    def describe_row_group(self, row_group: int) -> str:
        raise AssertionError("map-style data has no row groups")


class MapStyleDataset(_NoRowGroups):
    """A `Dataset` (see dataset_interface.py); a `MicroBatchSource` of what its processes make ahead
    (see micro_batches.py)."""

    def __init__(self, config: MapStyleData, *, schedule: StepSchedule, pin: bool = False) -> None:
        self._config, self._pin = config, pin
        self._order: Order | GrowingOrder = Order(
            group_rows=(_length(config),),
            virtual_workers=schedule.least,
            micro_batch_size=config.micro_batch_size,
            seed=config.seed,
            shuffle="full" if config.shuffle else "none",
            tail=config.tail,
        )
        if len(schedule.numbers) > 1:
            self._order = GrowingOrder(self._order, schedule)
        self.num_rows, self.steps_per_epoch = self._order.num_rows, self._order.steps_per_epoch
        self.fingerprint = _digest(config, self.num_rows, self._order.identity)
        self.last_step = None if config.epochs is None else self.steps_of(config.epochs)
        self._processes = [
            UserCodeProcess(f"data process {number + 1} of {config.workers}")
            for number in range(config.workers)
        ]
        self._micro_batches = MicroBatches(
            self,
            micro_batch_size=config.micro_batch_size,
            ahead_bytes=AHEAD_BYTES,
            producers=config.workers,
        )

    @property
    def counts(self) -> dict[str, float]:
        return {"waited_s": self._micro_batches.waited_s}

    def steps_of(self, epochs: int) -> int:
        return self._order.steps_of(epochs)

    def epoch_of(self, step: int) -> int:
        return self._order.epoch_of(step)

    def ends_epoch(self, step: int) -> bool:
        return self._order.ends_epoch(step)

    def rows(self, step: int, virtual_worker: int) -> int:
        return self._order.rows(step, virtual_worker)

    def masked(self, step: int, virtual_worker: int) -> int:
        return 0

    def bad_row_groups(self, step: int, virtual_worker: int) -> frozenset[int]:
        return frozenset()

    def check_bad(self, row_groups: Iterable[int]) -> None:
        pass

    def batch(self, step: int, virtual_worker: int) -> Any:
        if not self._processes:
            return _fetch_here(self._config, self._order.locate(step, virtual_worker)[1], self._pin)
        self._start_processes()
        try:
            return self._micro_batches.take(step, virtual_worker)
        except UserCodeError as error:
            where = self.describe(step, virtual_worker)
            raise located(error, step, virtual_worker, where) from None

    def describe(self, step: int, virtual_worker: int) -> str:
        return _describe(self._order.locate(step, virtual_worker)[1])

    def read_ahead(self, step: int, virtual_workers: Sequence[int]) -> None:
        """Does nothing without processes: items are fetched in `batch` then."""
        if self._processes:
            self._start_processes()
            self._micro_batches.read_ahead(step, virtual_workers)

    def close(self) -> None:
        """Does not close the dataset, which belongs to the user."""
        self._micro_batches.close()
        for process in self._processes:
            process.close()
        self._micro_batches.join()

    def _start_processes(self) -> None:
        if self._processes[0].pid is None:
            pickled = pickle_with_modules(_ItemsCall(self._config))
            for process in self._processes:
                process.start(pickled)

    # ------------------------------------------------------------- what micro-batches are made of

    def locate(self, steps: range, virtual_worker: int) -> list[tuple[Ints, int]]:
        found = [self._order.locate(step, virtual_worker)[1] for step in steps]
        return [(indices, len(indices)) for indices in found]

    def parts(self, before: Ints, after: Ints) -> bool:
        return False

    def together(self, step: int) -> int:
        return step

    def plan(self, needs: Sequence[tuple[Key, Sequence[Ints]]]) -> None:
        """Nothing to do: the dataset itself reads."""

    def forget(self, keys: Iterable[Key]) -> None:
        """Nothing to do: micro-batches that are being made are dropped later."""

    def make(self, key: Key, wanted: Sequence[MicroBatch], producer: int) -> tuple[list[Any], int]:
        (one,) = wanted
        made = self._processes[producer].run(one.work, *one.slot)
        made = pinned(made) if self._pin else made
        return [made], nbytes_of(made)


class MapStyleEvaluation(_NoRowGroups):
    """An `EvaluationData` (see dataset_interface.py)."""

    def __init__(self, config: MapStyleData, *, pin: bool = False) -> None:
        self._config, self._pin = config, pin
        self.num_rows = _length(config)
        self.num_batches = -(-self.num_rows // config.micro_batch_size)
        self.fingerprint = _digest(config, self.num_rows, f"evaluation {config.micro_batch_size}")

    def rows(self, index: int) -> int:
        return len(self._indices(index))

    def masked(self, index: int) -> int:
        return 0

    def check_left_out(self, rows: int) -> None:
        pass

    def batch(self, index: int) -> Any:
        return _fetch_here(self._config, self._indices(index), self._pin)

    def describe(self, index: int) -> str:
        return _describe(self._indices(index))

    def read_ahead(self, indices: Sequence[int]) -> None:
        """Does nothing: items may draw from the caller's generators."""

    def close(self) -> None:
        """Does not close the dataset, which belongs to the user."""

    def _indices(self, index: int) -> Ints:
        assert 0 <= index < self.num_batches, "no such batch"
        first = index * self._config.micro_batch_size
        last = min(first + self._config.micro_batch_size, self.num_rows)
        return np.arange(first, last, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class _ItemsCall:
    """The callable that a data process runs."""

    config: MapStyleData

    def __call__(self, indices: Ints, step: int, virtual_worker: int) -> Any:
        seed_everything(batch_seed(self.config.seed, step, virtual_worker))
        try:
            return _fetch(self.config, indices)
        except Exception as error:  # user code may raise anything
            message = traceback.format_exception_only(error)[-1].strip()
            lines = "".join(traceback.format_exception(error))
            raise UserCodeError("", f"MapStyleData raised {message}", lines) from error


def _length(config: MapStyleData) -> int:
    length = len(config.dataset)
    if length == 0:
        raise DataError(f"MapStyleData.dataset ({type(config.dataset).__name__}) is empty")
    return length


def _fetch(config: MapStyleData, indices: Ints) -> Any:
    assert len(indices), "a micro-batch of 0 rows is not to be asked for"
    fetch_all = getattr(config.dataset, "__getitems__", None)
    if callable(fetch_all):
        items = fetch_all(indices.tolist())
    else:
        items = [config.dataset[index] for index in indices.tolist()]
    return (config.collate_fn or default_collate)(items)


def _fetch_here(config: MapStyleData, indices: Ints, pin: bool) -> Any:
    """A micro-batch made in this process. Its tensors are aligned here; those from another process
    are aligned already."""
    batch = _fetch(config, indices)
    return pinned(batch) if pin else aligned_tensors(batch)


def _digest(config: MapStyleData, num_rows: int, identity: str) -> str:
    """A digest of what is known without reading items, which may be slow, random, or impossible
    outside of a worker.

    It has the name of the class without its module, which is "__main__" when the same file is run
    as a script.
    """
    named = f"{type(config.dataset).__qualname__} {num_rows} {config.fingerprint!r}"
    return hashlib.sha256(f"map-style {named} {identity}".encode()).hexdigest()


def _describe(indices: Ints) -> str:
    more = ", …" if len(indices) > _ROWS_NAMED else ""
    return f"rows {', '.join(map(str, indices[:_ROWS_NAMED].tolist()))}{more} of the dataset"
