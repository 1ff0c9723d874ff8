"""Adds up the gradients of one worker's virtual workers, by whole subtrees of the reduction tree.

The sums are a stack, on which each leaf (the turn of one virtual worker) pushes the sum that it
completes; see `reduction_tree.fold`. Sums on the stack are not copied, except gradients in the
memory of a CUDA graph, which its next replay would overwrite. Other code that reuses the memory of
a gradient is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from elastic_dp.device.graph_replay import graphs_are_replayed
from elastic_dp.distributed.gradient_buckets import PlacedRounding
from elastic_dp.distributed.reduction_tree import Node
from elastic_dp.errors import ModelError

Gradients = list[torch.Tensor | None]  # one per parameter, in layout order


class LocalReduction:
    """The sums of one worker.

    `fired[i]` is whether parameter i has received its gradient in the present leaf. `name` returns
    the name of a parameter by its number.
    """

    def __init__(self, name: Callable[[int], str]) -> None:
        self._name = name
        self._roundings: Sequence[PlacedRounding] = ()  # of the parameters
        self._copies = False  # whether gradients on the stack are copied
        self._stack: list[Gradients] = []  # sums of whole subtrees
        self._nodes: list[Node] = []  # ... and which they are
        self._node: Node = (0, 0)  # of the present leaf
        self._current: Gradients = []  # the sum that this leaf completes
        self.merges = 0  # how many sums of the stack this leaf's gradient is added to
        self.fired = bytearray()

    def __len__(self) -> int:
        return len(self._stack)

    def clear(self) -> None:
        self._current, self.merges = [], 0
        self._stack.clear()
        self._nodes.clear()

    def begin_leaf(self, roundings: Sequence[PlacedRounding], merges: int, node: Node) -> None:
        """Starts a leaf, or a finished node in place of its leaves. `roundings`: of the
        parameters."""
        self._roundings = roundings
        self.fired = bytearray(len(roundings))
        self._current = [None] * len(roundings)
        self._copies = graphs_are_replayed()
        self.merges, self._node = merges, node

    def fire(self, index: int) -> bool:
        """Marks that a parameter has received its gradient. Returns False if it had before."""
        first = not self.fired[index]
        self.fired[index] = 1
        return first

    def add_gradient(self, index: int, gradient: torch.Tensor | None) -> None:
        """Adds the gradient of this leaf, whose tensor the caller gives up. Raises ModelError."""
        value = self.sum_gradient(index, gradient)
        if value is not None and value is gradient and self._copies:
            value = value.clone()
        self._current[index] = value

    def end_leaf(self) -> None:
        node, kept = self.node, len(self._stack) - self.merges
        del self._stack[kept:], self._nodes[kept:]
        self._stack.append(self._current)
        self._nodes.append(node)
        self.merges = 0

    @property
    def node(self) -> Node:
        """The subtree whose sum the present leaf completes."""
        return (self._nodes[-self.merges][0] if self.merges else self._node[0], self._node[1])

    def finished(self) -> dict[Node, Gradients]:
        """Returns the sums on the stack, without those that an unfinished leaf may have added
        to."""
        return dict(zip(self._nodes, self.complete(), strict=False))

    def sum_gradient(
        self, index: int, value: torch.Tensor | None, out: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """Returns this leaf's gradient, added to the sums on the stack that it completes.

        What is done last, an addition or the rounding of the leaf, writes to `out`. Raises
        ModelError.
        """
        rounding, first = self._roundings[index]
        node = self._node
        if value is not None:
            self._refuse_reuse(index, value)
            value = rounding.round(value, node, first, None if self.merges else out)
        for depth in range(1, self.merges + 1):
            one, node = self._stack[-depth][index], (self._nodes[-depth][0], node[1])
            if one is None or value is None:
                value = value if one is None else one
            else:
                into = one if out is None or depth < self.merges else out
                value = rounding.add(one, value, node, first, into)
        return value

    def _refuse_reuse(self, index: int, value: torch.Tensor) -> None:
        """Raises ModelError if this gradient lies in the memory of a sum on the stack."""
        address = value.data_ptr()
        for sums in self._stack:
            one = sums[index]
            if one is not None and one.data_ptr() == address and value.numel():
                raise ModelError(
                    f"the gradient of model.{self._name(index)} lies in the memory of an earlier "
                    "micro-batch's, which is still needed, as with "
                    "make_graphed_callables or a backward() that returns the same "
                    "tensor each time. Use "
                    'torch.compile(mode="reduce-overhead"), whose gradients are copied, or return '
                    "a new tensor"
                )

    def complete(self) -> list[Gradients]:
        """Returns the sums of the subtrees that the present leaf does not add to, in order."""
        return self._stack[: len(self._stack) - self.merges]
