"""Micro-batches of sources that have columns or a transform of their own
(`DataConfig.source_options`): the rows of each source are assembled apart (source_parts.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from elastic_dp.config import DataConfig
from elastic_dp.data.columns.arrow_arrays import Column
from elastic_dp.data.datasets.row_micro_batches import RowStream
from elastic_dp.data.discovery.shard_index import Index
from elastic_dp.data.pipeline.batch_assembler import BatchAssembler, Ints
from elastic_dp.data.pipeline.collation import nbytes_of
from elastic_dp.data.pipeline.micro_batch_plan import MicroBatch
from elastic_dp.data.pipeline.row_group_reader import Key
from elastic_dp.data.pipeline.row_groups import RowGroups
from elastic_dp.data.pipeline.source_parts import SourcePart, SourceParts
from elastic_dp.sampling import GrowingOrder, Mixture, Order


class MixedStream(RowStream):
    def __init__(
        self,
        config: DataConfig,
        row_groups: RowGroups,
        order: Order | Mixture | GrowingOrder,
        index: Index,
        **options: Any,
    ) -> None:
        self._ends = np.array([source.end_group for source in index.sources])
        super().__init__(config, row_groups, order, **options)

    def make(self, key: Key, wanted: Sequence[MicroBatch], producer: int) -> tuple[list[Any], int]:
        (m,) = wanted  # since user code runs then
        groups, rows = m.work
        sources = np.searchsorted(self._ends, groups, side="right")
        assembler = _BySource(self._ends)
        places = {
            source: np.flatnonzero(sources == source) for source in np.unique(sources).tolist()
        }
        for source, of_source in places.items():
            assembler.of[source] = BatchAssembler(groups[of_source], rows[of_source], self._blocks)
        failed = self._fill(assembler, key)
        if failed:
            return [failed[min(failed)]], 0
        parts: SourceParts = []
        for source, of_source in places.items():
            one = assembler.of[source]
            arrays = one.cut(0, len(of_source))
            if arrays is not None:
                kept = ~np.isin(groups[of_source], one.left_out)
                parts.append(SourcePart(source, of_source[kept], arrays))
        made = self._finish(parts or None, m, producer)
        return [made], nbytes_of(made)


class _BySource:
    """Gives each row group to the assembler of its source."""

    def __init__(self, ends: Ints) -> None:
        self.of: dict[int, BatchAssembler] = {}
        self._ends = ends

    @property
    def row_groups(self) -> list[int]:
        return [row_group for assembler in self.of.values() for row_group in assembler.row_groups]

    def copy(
        self,
        row_group: int,
        columns: Mapping[str, Column],
        own: Callable[[int], int | None] = lambda row_group: None,
    ) -> None:
        self._of(row_group).copy(row_group, columns, own)

    def leave_out(self, row_group: int) -> None:
        self._of(row_group).leave_out(row_group)

    def _of(self, row_group: int) -> BatchAssembler:
        return self.of[int(np.searchsorted(self._ends, row_group, side="right"))]
