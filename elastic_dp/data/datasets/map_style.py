"""A map-style `torch.utils.data.Dataset`, in the same computed order as shards.

Access is random, so rows are permuted freely. Items are fetched one by one, or all at once if the
dataset has `__getitems__`. `__getitem__` and `collate_fn` may draw from the global generators:
those of the thread that calls `batch`, or, with `workers`, those of processes that fetch ahead and
seed them in the same way. So both give the same items.
"""

from __future__ import annotations

import hashlib
import random
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import ConcatDataset, Subset, default_collate

from elastic_dp.config import MapStyleData
from elastic_dp.data.discovery.shard_index import Index
from elastic_dp.data.pipeline.collation import aligned_tensors, located, nbytes_of, pinned
from elastic_dp.data.pipeline.global_generators import seed_everything
from elastic_dp.data.pipeline.pipeline import Pipeline
from elastic_dp.data.pipeline.planner import MicroBatch
from elastic_dp.data.pipeline.user_code_process import UserCodeProcess
from elastic_dp.errors import DataError, UserCodeError
from elastic_dp.module_pickling import pickle_with_modules
from elastic_dp.sampling import GrowingOrder, Order, StepSchedule, batch_seed

Ints = npt.NDArray[np.int64]

AHEAD_BYTES = 1 << 30  # limit of micro-batches that processes make ahead
_ROWS_NAMED = 8
_PROBED, _READS, _PROBING_S, _PROBE_SEED = 4, 3, 20.0, 7919


class _NoRowGroups:
    """A data set without row groups, so that none can be bad."""

    index: Index | None = None

    def mark_bad(self, row_groups: Iterable[int]) -> None:
        assert not list(row_groups), "map-style data has no row groups"

    def describe_row_group(self, row_group: int) -> str:
        raise AssertionError("map-style data has no row groups")


class MapStyleDataset(_NoRowGroups):
    """A `Dataset` (see dataset_interface.py); a `MicroBatchSource` of what its processes make ahead
    (see pipeline.py)."""

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
        self._pipeline = Pipeline(
            self,
            micro_batch_size=config.micro_batch_size,
            ahead_bytes=AHEAD_BYTES,
            assemblers=config.workers,
        )

    @property
    def counts(self) -> dict[str, float]:
        return {"waited_s": self._pipeline.waited_s}

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
            return self._pipeline.take(step, virtual_worker)
        except UserCodeError as error:
            where = self.describe(step, virtual_worker)
            raise located(error, step, virtual_worker, where) from None

    def describe(self, step: int, virtual_worker: int) -> str:
        return _describe(self._order.locate(step, virtual_worker)[1])

    def read_ahead(self, step: int, virtual_workers: Sequence[int]) -> None:
        """Does nothing without processes: items are fetched in `batch` then."""
        if self._processes:
            self._start_processes()
            self._pipeline.read_ahead(step, virtual_workers)

    def close(self) -> None:
        """Does not close the dataset, which belongs to the user."""
        self._pipeline.close()
        for process in self._processes:
            process.close()
        self._pipeline.join()

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

    def row_groups(self, works: Sequence[Ints]) -> Sequence[int]:
        """None: the dataset itself reads."""
        return ()

    def changes(self, works: Sequence[Ints], content: Any) -> bool:
        return False

    def assembly(self, wanted: Sequence[MicroBatch]) -> _ItemsAssembly:
        return _ItemsAssembly(wanted, self._processes, self._pin)


class _ItemsAssembly:
    """An `Assembly` (see pipeline.py) in another process."""

    def __init__(
        self, wanted: Sequence[MicroBatch], processes: Sequence[UserCodeProcess], pin: bool
    ) -> None:
        (self._one,), self._processes, self._pin = wanted, processes, pin

    def copy(self, contents: dict[int, Any], may_keep: Mapping[int, int]) -> None:
        """Nothing is read."""

    def finish(
        self, left_out: set[int], failed: Mapping[int, Exception], producer: int
    ) -> tuple[list[Any], int, list[int]]:
        made = self._processes[producer].run(self._one.work, *self._one.slot)
        made = pinned(made) if self._pin else made
        return [made], nbytes_of(made), []


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
            notes = " ".join(getattr(error, "__notes__", ()))
            message = f"{type(error).__name__}: {error} ({notes})"
            lines = "".join(traceback.format_exception(error))
            raise UserCodeError("", f"MapStyleData raised {message}", lines) from error


def _length(config: MapStyleData) -> int:
    length = len(config.dataset)
    if length == 0:
        raise DataError(f"MapStyleData.dataset ({type(config.dataset).__name__}) is empty")
    return length


def _fetch(config: MapStyleData, indices: Ints) -> Any:
    """A note of an error names the row."""
    assert len(indices), "a micro-batch of 0 rows is not to be asked for"
    rows, items = indices.tolist(), list[Any]()
    fetch_all = getattr(config.dataset, "__getitems__", None)
    try:
        if callable(fetch_all):
            items = fetch_all(rows)
        else:
            for row in rows:
                items.append(config.dataset[row])
        return (config.collate_fn or default_collate)(items)
    except Exception as error:  # user code may raise anything
        if not callable(fetch_all) and len(items) < len(rows):
            where = f"row {rows[len(items)]} of the dataset"
        else:
            where = _odd(rows, items) or _describe(indices)
        error.add_note(f"MapStyleData: {where}")
        raise


def _odd(rows: list[int], items: Sequence[Any]) -> str:
    """Which row has other shapes than the first one; "" if none has."""
    shapes = [_shape(item) for item in items]
    for row, shape in zip(rows, shapes, strict=False):
        if shape != shapes[0]:
            return f"row {row} of the dataset is {shape}, and row {rows[0]} is {shapes[0]}"
    return ""


def _shape(item: Any) -> str:
    if isinstance(item, torch.Tensor | np.ndarray):
        return f"{item.dtype} {[*item.shape]}"
    if isinstance(item, Mapping):
        return f"{{{', '.join(f'{key!r}: {_shape(value)}' for key, value in item.items())}}}"
    if isinstance(item, list | tuple):
        return f"[{', '.join(map(_shape, item))}]"
    return type(item).__name__


def _fetch_here(config: MapStyleData, indices: Ints, pin: bool) -> Any:
    """A micro-batch made in this process. Its tensors are aligned here; those from another process
    are aligned already."""
    batch = _fetch(config, indices)
    return pinned(batch) if pin else aligned_tensors(batch)


def _digest(config: MapStyleData, num_rows: int, identity: str) -> str:
    """A digest of what is known without reading items. It has the name of the class without its
    module, which is "__main__" when the same file is run as a script. `probed_rows` looks at items.
    """
    named = f"{type(config.dataset).__qualname__} {num_rows} {config.fingerprint!r}"
    chosen = "" if config.fingerprint else _chosen(config.dataset)
    return hashlib.sha256(f"map-style {named} {identity}{chosen}".encode()).hexdigest()


def _chosen(dataset: Any) -> str:
    """The indices of `torch.utils.data.Subset`s, also of nested and joined ones; "" if there are
    none."""
    if isinstance(dataset, Subset):
        indices = np.asarray(list(dataset.indices), np.int64)
        return f" {hashlib.sha256(indices.tobytes()).hexdigest()}{_chosen(dataset.dataset)}"
    parts = dataset.datasets if isinstance(dataset, ConcatDataset) else ()
    each = [_chosen(part) for part in parts]
    return f" {each}" if any(each) else ""


def probed_rows(config: MapStyleData) -> tuple[dict[str, str], str]:
    """(digest of each probed row by its number, what to say of those that are left out).

    A few rows, chosen by arithmetic, are read several times, each time with the same seed, so rows
    with random transforms are the same at each start. If a row still differs between two reads, or
    cannot be read or compared here, none is compared. With a `fingerprint` of the user nothing is
    read.
    """
    if config.fingerprint:
        return {}, ""
    number, found = len(config.dataset), dict[str, str]()
    states = random.getstate(), np.random.get_state(), torch.random.get_rng_state()
    began, why = time.monotonic(), ""
    try:
        for row in sorted({number * part // _PROBED for part in range(_PROBED)} | {number - 1}):
            reads = {_row_digest(config, row) for _ in range(_READS)}
            if len(reads) > 1:
                why = f"row {row} differs each time it is read"
                break
            found[str(row)] = reads.pop()
            if time.monotonic() - began > _PROBING_S:
                break
    except Exception as error:  # user code may raise anything, and may need what a worker has
        why = f"row {row} cannot be compared here: {type(error).__name__}: {error}"
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.random.set_rng_state(states[2])
    if not why:
        return found, ""
    return {}, (
        f"{why}; so a restart cannot tell whether the rows are the same. Set "
        "MapStyleData.fingerprint to a string that changes when they do"
    )


def _row_digest(config: MapStyleData, row: int) -> str:
    seed_everything(_PROBE_SEED + row)
    content = hashlib.sha256()
    _feed(content, config.dataset[row])
    return content.hexdigest()[:16]


def _feed(content: Any, value: Any) -> None:
    """Raises TypeError for a value that has no bytes of its own."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        bits = value.contiguous().flatten().view(torch.uint8) if value.numel() else value
        content.update(f"{value.dtype} {[*value.shape]}".encode() + bits.numpy().tobytes())
    elif isinstance(value, np.ndarray) and value.dtype != object:
        content.update(f"{value.dtype} {value.shape}".encode() + value.tobytes())
    elif value is None or isinstance(
        value, bool | int | float | complex | str | bytes | np.generic
    ):
        content.update(f"{type(value).__name__} {value!r};".encode(errors="surrogatepass"))
    elif isinstance(value, Mapping):
        _feed(content, [*value.items()])
    elif isinstance(value, Sequence | np.ndarray):
        content.update(f"{len(value)} items".encode())
        for each in value:
            _feed(content, each)
    elif callable(getattr(value, "tobytes", None)):  # an image of Pillow
        content.update(f"{value.size} {value.mode}".encode() + value.tobytes())
    else:
        raise TypeError(f"a {type(value).__name__} has no bytes to compare")


def _describe(indices: Ints) -> str:
    more = ", …" if len(indices) > _ROWS_NAMED else ""
    return f"rows {', '.join(map(str, indices[:_ROWS_NAMED].tolist()))}{more} of the dataset"
