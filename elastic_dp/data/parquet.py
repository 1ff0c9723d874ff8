"""Parquet shards as micro-batches: the order says which rows, the reader brings them, here they become tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from elastic_dp.data.manifest import Manifest
from elastic_dp.data.reader import RowGroupReader
from elastic_dp.errors import DataError
from elastic_dp.sampling import Order
from elastic_dp.spec import DataConfig

Ints = npt.NDArray[np.int64]

READ_AHEAD_STEPS = 4
_ROWS_NAMED = 8  # in an error message, of one shard
_SHARDS_NAMED = 3


class ParquetDataset:
    """A `Dataset` (see interface.py). `transform` gets a dict of NumPy arrays, and may return tensors."""

    manifest: Manifest | None

    def __init__(self, config: DataConfig, manifest: Manifest, order: Order) -> None:
        self.manifest, self._manifest = manifest, manifest
        self._config, self._order = config, order
        self.num_rows, self.steps_per_epoch = order.num_rows, order.steps_per_epoch
        identity = f"{manifest.digest} {order.identity}"
        self.fingerprint = hashlib.sha256(identity.encode()).hexdigest()
        self._reader = RowGroupReader(config, manifest)
        self._ours: frozenset[int] = frozenset()  # the virtual workers that read_ahead named
        self._located: dict[
            tuple[int, int], tuple[Ints, Ints]
        ] = {}  # by (step, virtual worker), ahead

    def epoch_of(self, step: int) -> int:
        return self._order.epoch_of(step)

    def ends_epoch(self, step: int) -> bool:
        return self._order.ends_epoch(step)

    def rows(self, step: int, virtual_worker: int) -> int:
        return self._order.rows(step, virtual_worker)

    def batch(self, step: int, virtual_worker: int) -> Any:
        known = self._located.pop((step, virtual_worker), None)
        groups, rows = known or self._order.locate(step, virtual_worker)
        assert len(rows), "a micro-batch of 0 rows is not to be asked for"
        arrays = self._reader.rows(groups, rows)
        if virtual_worker in self._ours:
            self._plan(step + READ_AHEAD_STEPS, virtual_worker)
        return to_micro_batch(self._config, arrays)

    def describe(self, step: int, virtual_worker: int) -> str:
        return describe_rows(self._manifest, *self._order.locate(step, virtual_worker))

    def read_ahead(self, step: int, virtual_workers: Sequence[int]) -> None:
        self._ours = frozenset(virtual_workers)
        self._located.clear()
        for ahead in range(READ_AHEAD_STEPS):
            for virtual_worker in virtual_workers:
                self._plan(step + ahead, virtual_worker)

    def close(self) -> None:
        self._reader.close()

    def _plan(self, step: int, virtual_worker: int) -> None:
        """The reader's threads fetch what the micro-batch needs; where its rows are is kept for `batch`."""
        if len(self._located) >= 2 * READ_AHEAD_STEPS * len(self._ours):
            self._located.clear()  # steps were jumped over
        located = self._located[step, virtual_worker] = self._order.locate(step, virtual_worker)
        self._reader.want(np.unique(located[0]).tolist())


class ParquetEvaluation:
    """An `EvaluationData` (see interface.py)."""

    manifest: Manifest | None

    def __init__(self, config: DataConfig, manifest: Manifest) -> None:
        self.manifest, self._manifest = manifest, manifest
        self._config = config
        self.num_rows = manifest.num_rows
        self._order = Order(
            group_rows=manifest.group_rows,
            virtual_workers=1,
            micro_batch_size=config.micro_batch_size,
            shuffle="none",
            tail="short",
        )
        self.num_batches = self._order.steps_per_epoch
        identity = f"evaluation {manifest.digest} {self._order.identity}"
        self.fingerprint = hashlib.sha256(identity.encode()).hexdigest()
        self._reader = RowGroupReader(config, manifest)

    def rows(self, index: int) -> int:
        return self._order.rows(index + 1, 0)

    def batch(self, index: int) -> Any:
        assert 0 <= index < self.num_batches, "no such batch"
        arrays = self._reader.rows(*self._order.locate(index + 1, 0))
        return to_micro_batch(self._config, arrays)

    def describe(self, index: int) -> str:
        return describe_rows(self._manifest, *self._order.locate(index + 1, 0))

    def close(self) -> None:
        self._reader.close()


def to_micro_batch(config: DataConfig, arrays: dict[str, Any]) -> Any:
    """The user's `transform`, then `collate_fn` or, without one, tensors that share the arrays' memory."""
    if config.transform is not None:
        arrays = config.transform(arrays)
    if config.collate_fn is not None:
        return config.collate_fn(arrays)
    if not isinstance(arrays, dict):
        raise DataError(
            f"DataConfig.transform returned a {type(arrays).__name__}, must return the dict of arrays; "
            "what makes the micro-batch itself is collate_fn"
        )
    return {name: _to_tensor(name, value) for name, value in arrays.items()}


def _to_tensor(name: str, value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.dtype != object:
        own = value.flags.writeable and all(stride >= 0 for stride in value.strides)
        return torch.from_numpy(value if own else value.copy())
    if isinstance(value, list) and value and isinstance(value[0], np.ndarray):
        raise DataError(
            f"column {name!r} holds lists of different lengths ({len(value[0])}, …) in one micro-batch; pad "
            "them in DataConfig.collate_fn, or leave the column out by DataConfig.columns"
        )
    return value


def describe_rows(manifest: Manifest, groups: Ints, rows: Ints) -> str:
    """ "rows 17, 93 of part-0.parquet; rows 5, 6, … of part-1.parquet", rows counted in the shard from 0."""
    by_shard: dict[str, list[int]] = {}
    for group, row in zip(groups.tolist(), rows.tolist(), strict=True):
        shard, _, first = manifest.groups[group]
        by_shard.setdefault(manifest.shards[shard].name, []).append(first + row)
    said = []
    for name, numbers in list(by_shard.items())[:_SHARDS_NAMED]:
        more = ", …" if len(numbers) > _ROWS_NAMED else ""
        said.append(f"rows {', '.join(map(str, numbers[:_ROWS_NAMED]))}{more} of {name}")
    if len(by_shard) > _SHARDS_NAMED:
        said.append(f"and of {len(by_shard) - _SHARDS_NAMED} more shards")
    return "; ".join(said) or "no rows"
