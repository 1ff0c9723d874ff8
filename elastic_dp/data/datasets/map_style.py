"""A map-style `torch.utils.data.Dataset`, in the same computed order as shards.

Access is random, so rows are permuted freely. Items are fetched one by one, or all at once if the
dataset has `__getitems__`. `__getitem__` and `collate_fn` may draw from the global generators:
those of the thread that calls `batch`, or, with `workers`, those of processes that fetch ahead and
seed them in the same way. So both give the same items.
"""

from __future__ import annotations

import hashlib
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import ConcatDataset, Subset, default_collate

from elastic_dp.config import MapStyleData
from elastic_dp.data.datasets.micro_batch_stream import MicroBatchStream
from elastic_dp.data.pipeline.collation import aligned_tensors, nbytes_of, pinned
from elastic_dp.data.pipeline.pipeline import Pipeline
from elastic_dp.data.pipeline.planner import MicroBatch
from elastic_dp.device.global_generators import generators_kept, seed_everything
from elastic_dp.errors import DataError, UserCodeError
from elastic_dp.sampling.order import Order, with_steps
from elastic_dp.sampling.seeds import batch_seed
from elastic_dp.sampling.step_schedule import StepSchedule

Ints = npt.NDArray[np.int64]

AHEAD_BYTES = 1 << 30  # limit of micro-batches that processes make ahead
_ROWS_NAMED = 8
_PROBED, _READS, _PROBING_S, _PROBE_SEED = 4, 3, 20.0, 7919


class ItemStream(MicroBatchStream):
    """Micro-batches of a map-style dataset, which is one row group that the dataset itself
    reads."""

    _config: MapStyleData

    def __init__(
        self,
        config: MapStyleData,
        *,
        schedule: StepSchedule | None = None,
        evaluation: bool = False,
        left_out: tuple[tuple[int, int], ...] = (),
        pin: bool = False,
    ) -> None:
        schedule, length = schedule or StepSchedule(1), _length(config)
        base = Order(
            group_rows=(length,),
            virtual_workers=schedule.least,
            micro_batch_size=config.micro_batch_size,
            seed=config.seed,
            shuffle="full" if config.shuffle and not evaluation else "none",
            tail="short" if evaluation else config.tail,
        )
        order = with_steps(base, schedule, left_out)
        workers = 0 if evaluation else config.workers
        super().__init__(config, order, workers=workers, pin=pin)
        identity = f"evaluation {config.micro_batch_size}" if evaluation else order.identity
        self.fingerprint = _digest(config, length, identity)
        self._pipeline = Pipeline(
            self,
            micro_batch_size=config.micro_batch_size,
            ahead_bytes=AHEAD_BYTES,
            assemblers=workers,
        )
        if config.epochs is not None:
            self.last_step = self.steps_of(config.epochs)

    def describe(self, step: int, virtual_worker: int) -> str:
        return _describe(self._order.locate(step, virtual_worker)[1])

    def batch(self, step: int, virtual_worker: int) -> Any:
        if self._processes:
            return super().batch(step, virtual_worker)
        made = _fetch(self._config, self._order.locate(step, virtual_worker)[1])
        # Tensors from another process are aligned already.
        return pinned(made) if self._pin else aligned_tensors(made)

    def read_ahead(self, step: int, virtual_workers: Sequence[int]) -> None:
        """Does nothing without processes: items may draw from the caller's generators."""
        if self._processes:
            super().read_ahead(step, virtual_workers)

    def _call(self) -> _ItemsCall:
        return _ItemsCall(self._config)

    # ------------------------------------------------------------- what micro-batches are made of

    def locate(self, steps: range, virtual_worker: int) -> list[tuple[Ints, int]]:
        each = self._order.locate_each(steps, virtual_worker)
        return [(indices, len(indices)) for _, indices in each]

    def row_groups(self, works: Sequence[Ints]) -> Sequence[int]:
        """None: the dataset itself reads."""
        return ()

    def assembly(self, wanted: Sequence[MicroBatch]) -> _ItemsAssembly:
        return _ItemsAssembly(self, wanted, self._pin)


class _ItemsAssembly:
    """An `Assembly` (see pipeline.py) in another process."""

    def __init__(self, stream: ItemStream, wanted: Sequence[MicroBatch], pin: bool) -> None:
        self._stream, (self._one,), self._pin = stream, wanted, pin

    def copy(self, contents: dict[int, Any], may_keep: Mapping[int, int]) -> None:
        """Nothing is read."""

    def finish(
        self, left_out: set[int], failed: Mapping[int, Exception], producer: int
    ) -> tuple[list[Any], int, list[int]]:
        made = self._stream.in_process(self._one, producer, self._one.work)
        made = pinned(made) if self._pin else made
        return [made], nbytes_of(made), []


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
            if config.collate_fn is None and len(items) != len(rows):
                raise DataError(
                    f"MapStyleData.dataset: __getitems__ returned {len(items)} items for "
                    f"{len(rows)} rows; return one for each, or set collate_fn"
                )
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
    began, why = time.monotonic(), ""
    try:
        for row in sorted({number * part // _PROBED for part in range(_PROBED)} | {number - 1}):
            with generators_kept(torch.device("cpu")):
                reads = {_row_digest(config, row) for _ in range(_READS)}
            if len(reads) > 1:
                why = f"row {row} differs each time it is read"
                break
            found[str(row)] = reads.pop()
            if time.monotonic() - began > _PROBING_S:
                break
    except Exception as error:  # user code may raise anything, and may need what a worker has
        why = f"row {row} cannot be compared here: {type(error).__name__}: {error}"
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
