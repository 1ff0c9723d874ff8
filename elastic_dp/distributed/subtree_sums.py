"""Adds up the gradients of one worker's virtual workers, by whole subtrees of the reduction tree.

The sums are a stack, on which each leaf (the turn of one virtual worker) puts the sum that it
completes; see `reduction_tree.fold`. Sums that wait are not copied.
"""

from __future__ import annotations

import torch

Gradients = list[torch.Tensor | None]  # one per parameter, in layout order


class SubtreeSums:
    """`fired[i]`: whether parameter i has got its gradient in the present leaf."""

    def __init__(self) -> None:
        self._stack: list[Gradients] = []  # sums of whole subtrees
        self._current: Gradients = []  # the sum that this leaf completes
        self.merges = 0  # to so many of the stack this leaf's gradient is added
        self.fired = bytearray()

    def __len__(self) -> int:
        return len(self._stack)

    def clear(self) -> None:
        self._current = []
        self._stack.clear()

    def begin_leaf(self, parameters: int, merges: int) -> None:
        self.fired = bytearray(parameters)
        self._current = [None] * parameters
        self.merges = merges

    def add(self, index: int, gradient: torch.Tensor | None) -> None:
        """The gradient of this leaf; the caller gives up its tensor."""
        self._current[index] = self.merged(index, gradient) if self.merges else gradient

    def end_leaf(self) -> None:
        del self._stack[len(self._stack) - self.merges :]
        self._stack.append(self._current)

    def merged(
        self, index: int, value: torch.Tensor | None, out: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """This leaf's gradient, added to the sums that wait for it; the last of them goes to
        `out`."""
        for depth in range(1, self.merges + 1):
            one = self._stack[-depth][index]
            if one is None or value is None:
                value = value if one is None else one
            elif out is not None and depth == self.merges:
                value = torch.add(one, value, out=out)
            else:
                value = one.add_(value)
        return value

    def complete(self) -> list[Gradients]:
        """Sums of the subtrees to which the present leaf adds nothing more, in order."""
        return self._stack[: len(self._stack) - self.merges]
