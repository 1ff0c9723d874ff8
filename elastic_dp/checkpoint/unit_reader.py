"""Reads units of an optimizer's state (state_units.py), and puts whole states together from them.

Only functions that make tensors import torch (see layout.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from elastic_dp.checkpoint.catalog import Catalog, blob_path
from elastic_dp.checkpoint.checkpoint_files import read_range, threads
from elastic_dp.checkpoint.commit_record import CommitRecord
from elastic_dp.checkpoint.state_units import PlacedUnit, StateUnit, UnitKind


def read_unit(
    catalog: Catalog, commit: CommitRecord, placed: PlacedUnit, target: memoryview | None = None
) -> memoryview:
    """Returns the bytes of a unit, in `target` or in new memory. Raises CheckpointDamaged."""
    if target is None:
        target = memoryview(bytearray(placed.unit.kind.nbytes))
    if len(target):
        path = blob_path(catalog.folder, commit.step, placed.file.name)
        read_range(catalog, commit, path, placed.at, target, placed.unit.digest)
    return target


def read_states(
    catalog: Catalog, commit: CommitRecord, units: Sequence[PlacedUnit], *, plain: bool = False
) -> Iterator[tuple[StateUnit, dict[str, Any]]]:
    """Yields each of these units and its state. `plain`: see `decode`. Raises CheckpointDamaged."""

    def read(placed: PlacedUnit) -> dict[str, Any]:
        return state_of(placed.unit.kind, read_unit(catalog, commit, placed), plain=plain)

    with ThreadPoolExecutor(threads(catalog)) as executor:
        for placed, state in zip(units, executor.map(read, units), strict=True):
            yield placed.unit, state


def state_of(kind: UnitKind, content: memoryview, *, plain: bool = False) -> dict[str, Any]:
    """Returns the state of a unit, with tensors of their own on the host. `plain`: see `decode`."""
    import torch

    from elastic_dp.checkpoint.codec import decode

    tensors, at = [], 0
    for spec in kind.specs:
        flat = torch.empty(spec.nbytes, dtype=torch.uint8)  # aligned, which `content` is not
        memory: Any = flat.numpy()
        memoryview(memory)[:] = content[at : at + spec.nbytes]
        tensors.append(spec.view(flat))
        at += spec.nbytes
    state: dict[str, Any] = decode(kind.tree, tensors, plain=plain)
    return state


def add_states(tree: Any, states: Iterable[tuple[StateUnit, dict[str, Any]]]) -> None:
    """Adds the states of all units to a state that has none of its optimizer."""
    import torch

    for unit, state in states:
        kind, (number, first, last) = unit.kind, unit.place
        whole = tree["step"]["optimizer"][number]
        for key, value in state.items():
            if kind.shape is None or not isinstance(value, torch.Tensor) or not value.dim():
                whole[key] = value
                continue
            assert kind.stride is not None
            if key not in whole:
                whole[key] = torch.empty_strided(kind.shape, kind.stride, dtype=value.dtype)
            in_memory = whole[key].as_strided((whole[key].numel(),), (1,))
            in_memory[first:last].copy_(value)
