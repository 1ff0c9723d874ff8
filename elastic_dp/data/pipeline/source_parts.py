"""A micro-batch of several sources that have columns or a transform of their own: it is assembled,
decoded and transformed source by source, and joined then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from elastic_dp.config.source_options import name_of
from elastic_dp.data.pipeline.array_memory import aligned, aligned_copy
from elastic_dp.data.pipeline.batch_assembler import Ints, regular
from elastic_dp.errors import DataError


@dataclass(frozen=True, slots=True)
class SourcePart:
    """The rows of a micro-batch that are of one source. `places`: where each is among all rows of
    the micro-batch."""

    source: int
    places: Ints
    arrays: dict[str, Any]


SourceParts = list[SourcePart]  # those of a micro-batch


def check_part(url: str, arrays: Any, rows: int) -> None:
    """Raises DataError if the transform of the source has not returned a dict of columns with as
    many rows."""
    what = f"{name_of(url)}['transform'] returned"
    if not isinstance(arrays, dict):
        raise DataError(f"{what} a {type(arrays).__name__}, must return a dict of columns")
    for name, column in arrays.items():
        if not isinstance(column, np.ndarray | list) or len(column) != rows:
            has = f"{len(column)} rows" if isinstance(column, np.ndarray | list) else "no rows"
            raise DataError(
                f"{what} column {name!r} as a {type(column).__name__} with {has}, must return an "
                f"array or list with the {rows} rows that it was given"
            )


def joined(parts: SourceParts, urls: Sequence[str]) -> dict[str, Any]:
    """The columns of all rows, in the order of the micro-batch. Raises DataError if the sources
    have different columns, or types."""
    first = parts[0]
    for part in parts[1:]:
        if part.arrays.keys() != first.arrays.keys():
            mine, other = ([*p.arrays] for p in (first, part))
            raise DataError(
                f"a micro-batch has the columns {mine} of {urls[first.source]!r} and {other} of "
                f"{urls[part.source]!r}; let the transforms of source_options return the same"
            )
    kept = np.concatenate([part.places for part in parts])
    at = np.argsort(np.argsort(kept))  # without the rows that were left out
    each = np.split(at, np.cumsum([len(part.places) for part in parts])[:-1])
    return {
        name: _column(
            name, [(p, p.arrays[name], at) for p, at in zip(parts, each, strict=True)], urls
        )
        for name in first.arrays
    }


def _column(name: str, pieces: list[tuple[SourcePart, Any, Ints]], urls: Sequence[str]) -> Any:
    rows = sum(len(at) for _, _, at in pieces)
    arrays = [(part, array) for part, array, _ in pieces if isinstance(array, np.ndarray)]
    for part, array in arrays[1:]:
        first, of_first = arrays[0]
        if array.dtype != of_first.dtype:
            raise DataError(
                f"column {name!r} is {of_first.dtype} of {urls[first.source]!r} and "
                f"{array.dtype} of {urls[part.source]!r} in one micro-batch; convert one of them "
                "in its transform (source_options)"
            )
    shapes = {array.shape[1:] for _, array in arrays}
    if len(arrays) == len(pieces) and len(shapes) == 1:
        out = np.empty((rows, *shapes.pop()), arrays[0][1].dtype)
        for _, array, at in pieces:
            out[at] = array
        return aligned(out)
    items: list[Any] = [None] * rows
    for _, column, at in pieces:
        for place, item in zip(at.tolist(), column, strict=True):
            items[place] = aligned_copy(item) if isinstance(item, np.ndarray) else item
    return regular(items)
