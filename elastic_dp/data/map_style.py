"""A map-style `torch.utils.data.Dataset` in the same order arithmetic.

Access is random, so all rows are permuted freely. Items are fetched in the caller's thread only, one by one
(`__getitems__`, where the dataset has it, all at once): the random numbers of `__getitem__` are the dataset's
own business, and come from generators that the caller may have seeded. So there is nothing to read ahead.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import default_collate

from elastic_dp.data.manifest import Manifest
from elastic_dp.errors import DataError
from elastic_dp.sampling import Order
from elastic_dp.spec import MapStyleData

_ROWS_NAMED = 8


class MapStyleDataset:
    """A `Dataset` (see interface.py)."""

    manifest: Manifest | None = None

    def __init__(self, config: MapStyleData, *, virtual_workers: int) -> None:
        self._config = config
        self._order = Order(
            group_rows=(_length(config),),
            virtual_workers=virtual_workers,
            micro_batch_size=config.micro_batch_size,
            seed=config.seed,
            shuffle="full" if config.shuffle else "none",
            tail=config.tail,
        )
        self.num_rows, self.steps_per_epoch = self._order.num_rows, self._order.steps_per_epoch
        self.fingerprint = _digest(self.num_rows, self._order.identity)

    def epoch_of(self, step: int) -> int:
        return self._order.epoch_of(step)

    def ends_epoch(self, step: int) -> bool:
        return self._order.ends_epoch(step)

    def rows(self, step: int, virtual_worker: int) -> int:
        return self._order.rows(step, virtual_worker)

    def batch(self, step: int, virtual_worker: int) -> Any:
        return _fetch(self._config, self._order.locate(step, virtual_worker)[1])

    def describe(self, step: int, virtual_worker: int) -> str:
        return _describe(self._order.locate(step, virtual_worker)[1])

    def read_ahead(self, step: int, virtual_workers: Sequence[int]) -> None:
        """Does nothing, see the file's docstring."""

    def close(self) -> None:
        """The dataset is the user's."""


class MapStyleEvaluation:
    """An `EvaluationData` (see interface.py)."""

    manifest: Manifest | None = None

    def __init__(self, config: MapStyleData) -> None:
        self._config = config
        self.num_rows = _length(config)
        self.num_batches = -(-self.num_rows // config.micro_batch_size)
        self.fingerprint = _digest(self.num_rows, f"evaluation {config.micro_batch_size}")

    def rows(self, index: int) -> int:
        return len(self._indices(index))

    def batch(self, index: int) -> Any:
        return _fetch(self._config, self._indices(index))

    def describe(self, index: int) -> str:
        return _describe(self._indices(index))

    def close(self) -> None:
        """The dataset is the user's."""

    def _indices(self, index: int) -> npt.NDArray[np.int64]:
        assert 0 <= index < self.num_batches, "no such batch"
        first = index * self._config.micro_batch_size
        last = min(first + self._config.micro_batch_size, self.num_rows)
        return np.arange(first, last, dtype=np.int64)


def _length(config: MapStyleData) -> int:
    length = len(config.dataset)
    if length == 0:
        raise DataError(f"MapStyleData.dataset ({type(config.dataset).__name__}) is empty")
    return length


def _fetch(config: MapStyleData, indices: npt.NDArray[np.int64]) -> Any:
    assert len(indices), "a micro-batch of 0 rows is not to be asked for"
    fetch_all = getattr(config.dataset, "__getitems__", None)
    if callable(fetch_all):
        items = fetch_all(indices.tolist())
    else:
        items = [config.dataset[index] for index in indices.tolist()]
    return (config.collate_fn or default_collate)(items)


def _digest(num_rows: int, identity: str) -> str:
    return hashlib.sha256(f"map-style {num_rows} {identity}".encode()).hexdigest()


def _describe(indices: npt.NDArray[np.int64]) -> str:
    more = ", …" if len(indices) > _ROWS_NAMED else ""
    return f"rows {', '.join(map(str, indices[:_ROWS_NAMED].tolist()))}{more} of the dataset"
