"""Tensors of a tree that share memory: stores the memory once and each tensor as a view of it.

An optimizer may keep its state in views of one vector, or one table in the state of every
parameter. Sent one by one, these tensors would no longer share memory. A tensor in memory that the
receiver also has, such as a parameter's, becomes a view of that memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from elastic_dp.checkpoint.python_objects import MARK
from elastic_dp.errors import ModelError

_ALIGNED_TO = 64  # bytes; the alignment of an address may decide which kernel runs


def split_aliases(tree: Any, owners: Mapping[str, torch.Tensor]) -> tuple[Any, list[torch.Tensor]]:
    """Replaces tensors that share memory by descriptions of views.

    A tensor is replaced if it lies in the memory of one of `owners`, or shares memory with another
    tensor of the tree. Returns the tree, and the memory of the latter as uint8 tensors. Tensors
    that share nothing stay.
    """
    owned = {_storage(tensor): name for name, tensor in owners.items()}
    found: dict[int, list[torch.Tensor]] = {}
    _add_tensors(tree, found)
    shared: list[torch.Tensor] = []
    views: dict[int, tuple[str | int, int]] = {}  # storage -> (owner or number, first byte)
    for storage, tensors in found.items():
        if storage in owned:
            owner = owners[owned[storage]]
            views[storage] = owned[storage], int(owner.storage_offset()) * owner.element_size()
        elif len(tensors) > 1:
            first = min(int(t.storage_offset()) * t.element_size() for t in tensors)
            first -= first % _ALIGNED_TO
            last = max((t.storage_offset() + _reach(t)) * t.element_size() for t in tensors)
            room = torch.empty(0, dtype=torch.uint8, device=tensors[0].device)
            shared.append(room.set_(tensors[0].untyped_storage(), first, (last - first,), (1,)))
            views[storage] = len(shared) - 1, first

    def mark(tensor: torch.Tensor) -> Any:
        if _storage(tensor) not in views:
            return tensor
        of, first = views[_storage(tensor)]
        return {
            MARK: "view",
            "of": of,
            "at_bytes": tensor.storage_offset() * tensor.element_size() - first,
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
            "stride": list(tensor.stride()),
        }

    return (_replaced(tree, mark) if views else tree), shared


def join_aliases(
    tree: Any, shared: list[torch.Tensor], owners: Mapping[str, torch.Tensor]
) -> tuple[Any, set[int]]:
    """Reverses `split_aliases`. Returns the tree and the identities of the tensors that are views.

    Raises ModelError if the memory of an owner does not fit.
    """
    made: dict[tuple[Any, ...], torch.Tensor] = {}

    def view(mark: dict[str, Any]) -> torch.Tensor:
        key = (*(str(mark[word]) for word in ("of", "at_bytes", "dtype", "shape", "stride")),)
        if key not in made:
            made[key] = _view(mark, shared, owners)
        return made[key]

    whole = _joined(tree, view)
    return whole, {id(tensor) for tensor in made.values()}


def _view(
    mark: dict[str, Any], shared: list[torch.Tensor], owners: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    of, dtype = mark["of"], getattr(torch, mark["dtype"])
    base = owners.get(of) if isinstance(of, str) else shared[of]
    if base is None:
        raise ModelError(f"the optimizer's state lies in the memory of {of}, which is not here")
    first = base.storage_offset() * base.element_size() + mark["at_bytes"]
    room = torch.empty(0, dtype=dtype, device=base.device)
    last = first + (_reach_of(mark["shape"], mark["stride"])) * room.element_size()
    if first < 0 or first % room.element_size() or last > base.untyped_storage().nbytes():
        raise ModelError(f"the optimizer's state lies beside {of}, which has other memory here")
    offset = first // room.element_size()
    return room.set_(base.untyped_storage(), offset, mark["shape"], mark["stride"])


def _add_tensors(tree: Any, found: dict[int, list[torch.Tensor]]) -> None:
    if isinstance(tree, torch.Tensor):
        at = _storage(tree)
        if at:  # it has elements
            found.setdefault(at, []).append(tree)
    elif type(tree) is dict:
        for item in tree.values():
            _add_tensors(item, found)
    elif type(tree) in (list, tuple):
        for item in tree:
            _add_tensors(item, found)


def _replaced(tree: Any, mark: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        return mark(tree)
    if type(tree) is dict:
        return {key: _replaced(item, mark) for key, item in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(_replaced(item, mark) for item in tree)
    return tree


def _joined(tree: Any, view: Any) -> Any:
    if type(tree) is dict:
        if tree.get(MARK) == "view":
            return view(tree)
        return {key: _joined(item, view) for key, item in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(_joined(item, view) for item in tree)
    return tree


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _reach(tensor: torch.Tensor) -> int:
    return _reach_of(tensor.shape, tensor.stride())


def _reach_of(shape: Any, stride: Any) -> int:
    return 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
