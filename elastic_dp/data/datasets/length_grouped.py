"""Micro-batches of rows of similar length (sampling/length_groups.py).

The lengths are known once the rows are read, so the micro-batches of a window are made together: as
one chunk, of which a step takes its own. Who needs one of them alone, as after a resume in the
middle of a window, reads all rows of the window.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from elastic_dp.config import DataConfig
from elastic_dp.data.columns.column_types import is_list, plain, type_name
from elastic_dp.data.datasets.row_micro_batches import RowStream, located_in_order, rows_named
from elastic_dp.data.pipeline.batch_assembler import BatchAssembler, Ints
from elastic_dp.data.pipeline.collation import nbytes_of
from elastic_dp.data.pipeline.micro_batch_plan import MicroBatch
from elastic_dp.data.pipeline.row_group_reader import Key
from elastic_dp.data.pipeline.row_groups import RowGroups
from elastic_dp.errors import BadShard, DataError
from elastic_dp.sampling import GrowingOrder, Order
from elastic_dp.sampling.length_groups import WINDOW, grouped, window_of


class _Window(NamedTuple):
    """The rows of a virtual worker in a window: `groups`, `rows` int64 [rows], and `sizes`, the
    numbers of rows of its micro-batches."""

    groups: Ints
    rows: Ints
    steps: range
    sizes: tuple[int, ...]


class LengthGroupedStream(RowStream):
    """`order`: that of the rows before they are grouped."""

    def __init__(
        self,
        config: DataConfig,
        row_groups: RowGroups,
        order: Order | GrowingOrder,
        **options: Any,
    ) -> None:
        assert config.group_by_length is not None
        self._column, self._steps_alike = config.group_by_length, order.steps_alike
        super().__init__(config, row_groups, order, **options)

    def describe(self, step: int, virtual_worker: int) -> str:
        """Names rows of the window, since which of them it is depends on their lengths."""
        ((window, rows),) = self.locate(range(step, step + 1), virtual_worker)
        named = rows_named(self._row_groups, window.groups, window.rows, self._config)
        return f"{rows} of {len(window.rows)} rows grouped by length: {named}"

    # ------------------------------------------------- what micro-batches are made of

    def together(self, step: int) -> int:
        return window_of(step, self._steps_alike(step)).stop

    def locate(self, steps: range, virtual_worker: int) -> list[tuple[_Window, int]]:
        found: list[tuple[_Window, int]] = []
        step = steps.start
        while step < steps.stop:
            window = window_of(step, self._steps_alike(step))
            each = located_in_order(self._order, window, virtual_worker)
            groups, rows = map(np.concatenate, zip(*each, strict=True))
            sizes = tuple(self._order.rows(at, virtual_worker) for at in window)
            work = _Window(groups, rows, window, sizes)
            here = range(step, min(window.stop, steps.stop))
            found += [(work, sizes[at - window.start]) for at in here]
            step = window.stop
        return found

    def plan(self, needs: Sequence[tuple[Key, Sequence[_Window]]]) -> None:
        """The works of a window are the same, so one of them says it all."""
        super().plan([(key, list({id(w.rows): w for w in works}.values())) for key, works in needs])

    def make(self, key: Key, wanted: Sequence[MicroBatch], producer: int) -> tuple[list[Any], int]:
        windows: dict[tuple[int, int], _Window] = {}
        for m in wanted:
            windows.setdefault((m.virtual_worker, m.work.steps.start), m.work)
        groups = np.concatenate([window.groups for window in windows.values()])
        rows = np.concatenate([window.rows for window in windows.values()])
        assembler = BatchAssembler(groups, rows, self._blocks)
        failed = self._fill(assembler, key)
        parts, start = dict[tuple[int, int], list[Ints] | BadShard](), 0
        for slot, window in windows.items():
            stop = start + len(window.rows)
            if unreadable := failed.keys() & set(window.groups.tolist()):
                parts[slot] = failed[min(unreadable)]
            else:
                lengths = _lengths(assembler.output(self._column)[start:stop])
                in_window = grouped(window.steps, lengths, window.sizes, self._seed)
                parts[slot] = [start + part for part in in_window]
            start = stop
        made = [
            self._made(m, parts[m.virtual_worker, m.work.steps.start], assembler, producer)
            for m in wanted
        ]
        return made, sum(map(nbytes_of, made))

    def _made(
        self, m: MicroBatch, parts: list[Ints] | BadShard, assembler: BatchAssembler, producer: int
    ) -> Any:
        """The micro-batch, or the error that its step raises; others of the chunk have none."""
        if isinstance(parts, BadShard):
            return parts
        try:
            return self._finish(assembler.pick(parts[m.step - m.work.steps.start]), m, producer)
        except Exception as error:  # of user code
            return error


def _lengths(column: Any) -> Ints:
    """A number is a length; anything else has one. That of a null is 0."""
    if isinstance(column, np.ndarray):
        return column if column.ndim == 1 else np.full(len(column), column.shape[1])
    return np.array([0 if row is None else len(row) for row in column], np.int64)


def identity(config: DataConfig) -> str:
    """What `group_by_length` adds to the order's identity."""
    if config.group_by_length is None:
        return ""
    return f" grouped 1 by={config.group_by_length!r} window={WINDOW}"


def check_lengths(column: str | None, leaves: Iterable[pa.Field]) -> None:
    """Raises DataError if the job reads no such column, or it has no lengths."""
    if column is None:
        return
    types = {leaf.name: plain(leaf.type) for leaf in leaves}
    if column not in types:
        raise DataError(
            f"DataConfig.group_by_length: the job reads no column {column!r}, only "
            f"{', '.join(map(repr, types))}"
        )
    kind = types[column]
    has_length = pa.types.is_integer(kind) or is_list(kind)
    for test in ("string", "large_string", "binary", "large_binary"):
        has_length = has_length or getattr(pa.types, f"is_{test}")(kind)
    if not has_length:
        raise DataError(
            f"DataConfig.group_by_length: column {column!r} is {type_name(kind)}; it must hold "
            "lists, texts, or the lengths as whole numbers"
        )
