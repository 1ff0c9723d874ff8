"""What a worker has finished of a step that was not completed, kept for the next attempt.

A lost peer ends the step of all members. The weights have not moved, the rows are the same, and the
sums follow one tree, so the sum of a subtree that this worker has finished is still right, bit for
bit. In the next generation it is used where the subtree lies within the worker's range of virtual
workers: only what is missing runs again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from elastic_dp.distributed.gradient_buckets import Gradients
from elastic_dp.distributed.reduction_tree import Node, Share
from elastic_dp.train.state.module_buffers import LeafBuffers
from elastic_dp.train.step.micro_batch import MicroBatchResult


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What the gradients of a step depend on: a sum is used again only if all of it is the same.

    Step and lineage stand for the weights and the rows.
    """

    step: int
    lineage_id: int  # of the worker's state
    exact: bool
    expected_weight: float
    loss_scale: float | None
    bad_row_groups: frozenset[int]
    parameters: tuple[int, ...]  # the identities of those that require a gradient, in layout order


@dataclass(frozen=True, slots=True)
class FinishedNode:
    """The sum of a subtree, with what its leaves (virtual workers) gave."""

    gradients: Gradients
    results: Mapping[int, MicroBatchResult]
    buffers: Mapping[int, LeafBuffers]


@dataclass(slots=True)
class FinishedWork:
    """The finished nodes of one step. No two of them overlap.

    `inputs` is None for the last committed step; see delayed_gradient.py.
    """

    inputs: StepInputs | None = None
    nodes: dict[Node, FinishedNode] = field(default_factory=dict)

    def take(self, first: int, limit: int) -> tuple[Node, FinishedNode] | None:
        """Removes and returns the node that begins at virtual worker `first`, if there is one and
        it ends at `limit` or before. Its gradients may be overwritten from then on."""
        for node in self.nodes:
            if node[0] == first and node[1] <= limit:
                return node, self.nodes.pop(node)
        return None

    def covers(self, share: Share) -> bool:
        """Returns whether these nodes are all that `take` is asked for of a share."""
        for first, limit in share:
            while first < limit:
                node = next((n for n in self.nodes if n[0] == first and n[1] <= limit), None)
                if node is None:
                    return False
                first = node[1]
        return True

    def add(self, node: Node, finished: FinishedNode) -> None:
        """Adds a node, in place of those that it overlaps."""
        low, high = node
        self.nodes = {n: f for n, f in self.nodes.items() if n[1] <= low or high <= n[0]}
        self.nodes[node] = finished


def finished_of(inputs: StepInputs, work: FinishedWork | None) -> FinishedWork:
    """Returns `work` if it was made of these inputs, and none otherwise."""
    return work if work is not None and work.inputs == inputs else FinishedWork(inputs)
