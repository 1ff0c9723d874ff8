"""CUDA graphs that `torch.compile(mode="reduce-overhead")` replays.

Their results lie in memory that the next replay writes again, gradients included. Whoever keeps one
longer copies it."""

from __future__ import annotations

import sys

import torch

_TREES = "torch._inductor.cudagraph_trees"  # imported by torch when the first of them is made


def graphs_are_replayed() -> bool:
    """Whether compiled code of this process replays CUDA graphs."""
    return _TREES in sys.modules


def begin_graph_iteration() -> None:
    """No result of an earlier micro-batch is needed any more. Torch guesses that from the order of
    forward and backward passes, and a micro-batch of weight 0 has no backward pass.

    See torch.compiler.cudagraph_mark_step_begin, which would import the compiler.
    """
    trees = sys.modules.get(_TREES)
    if trees is not None:
        trees.mark_step_begin()


def outside_graphs(value: torch.Tensor) -> torch.Tensor:
    """Returns the value in memory that no replay writes."""
    return value.clone() if graphs_are_replayed() else value
