"""Adds up the gradients of this worker's virtual workers, during backward, for an exchange with
those of other members (gradient_exchange.py).

Exact mode adds along the fixed tree of reduction_tree.py: the sum has the same bits for every world
size. A worker adds its own subtrees as it computes. The sums form a stack, on which each leaf (the
turn of one virtual worker) pushes the sum that it completes (`reduction_tree.fold`). After each
backward pass all gradients are taken from `p.grad` and added together, by a few operators for lists
of tensors. Only in the backward pass of the last leaf there are hooks, one for each bucket, on the
parameter that gets its gradient last: they send what is complete.

The invariants are:

- User code never sees the gradient of another micro-batch: `p.grad` is None when a loss function
  and its backward pass begin. A gradient that a loss function leaves there is an error, and so is a
  post-accumulate-grad hook other than ours.
- Buckets are launched in index order, the same on every rank. A bucket is launched early only when
  each of its parameters has a gradient. A parameter that gets one more after that (tied weights
  under reentrant checkpointing get two in one backward) invalidates the step (`late`). From then on
  (`sequential`) nothing is launched before backward has ended.
- The last leaf is added up in the buffers that are sent, so the stack stays as it is.
- An absent gradient travels as -0.0, neutral in IEEE addition: x + -0.0 is x, also for x = -0.0.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from elastic_dp.device.graph_replay import graphs_are_replayed
from elastic_dp.distributed.cross_worker_reduction import ReductionPlan
from elastic_dp.distributed.gradient_buckets import (
    GradientBucket,
    GradientLayout,
    Gradients,
    add_present,
    all_present,
    is_given,
)
from elastic_dp.distributed.gradient_exchange import GradientExchange
from elastic_dp.distributed.gradient_rounding import Wire
from elastic_dp.distributed.local_shards import is_sharded, local_of, placed_like
from elastic_dp.distributed.process_group import ProcessGroup
from elastic_dp.distributed.reduction_tree import Node, Share, TreeLeaf
from elastic_dp.errors import GroupError, LossError, ModelError

_gradient = attrgetter("grad")
_hooks_of = attrgetter("_post_accumulate_grad_hooks")


class SubtreeSum(NamedTuple):
    """The sum of a whole subtree of this worker's leaves. `addresses`: of the memory it lies in.
    `is_complete`: every parameter has a gradient."""

    node: Node
    gradients: Gradients
    addresses: set[int]
    is_complete: bool


class GradientReducer:
    """Adds up gradients for one model, in the buffers of `exchange`."""

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        wire: Wire = None,
        note: Callable[[int], None] | None = None,
        *,
        exchange: GradientExchange | None = None,
        computes: bool = True,
    ) -> None:
        """`wire`: how gradients are rounded. `note` hears the number of each parameter, in layout
        order, when it gets a gradient in a backward pass. In exact mode two may share the work: one
        sends none of its sums, which `take_sums` returns, and the other one, which `computes`
        nothing, what `add_finished` gives it."""
        self._wire, self._note = wire, note
        self._computes, self._sends = computes, True
        self.exchange = exchange or GradientExchange(parameters.values())
        self._names = {p: name for name, p in parameters.items()}
        self._all = list(self._names)
        self._sharded = any(map(is_sharded, self._all))
        self._layout = GradientLayout([])
        self._hooks: list[Any] = []
        self._own_hooks: list[int] = []  # their number, by parameter
        # As gradients come, until their order is known.
        self._arrivals: list[torch.Tensor] = []
        self._plan: ReductionPlan | None = None  # of the present generation
        self._stack: list[SubtreeSum] = []
        # Of the present leaf: its node, to how many sums of the stack it is added, and for the last
        # one its gradients, if they are not in `p.grad`.
        self._node: Node = (0, 0)
        self._merges = 0
        self._last: Gradients | None = None
        # Whether a parameter has a gradient, and in the last subtree.
        self._used, self._in_last = bytearray(), bytearray()
        # `sequential`: later attempts are, after a parameter fired twice in one backward.
        self.sequential = self.late = False
        # Hooks act only within a step's backward passes, and launch only in the last one.
        self._running = self._is_last = False
        self._next = 0  # the first bucket that is not launched
        self._error: GroupError | None = None
        self._early = True

    # ----------------------------------------------------------------------- generation

    def open(
        self,
        group: ProcessGroup,
        shares: Sequence[Share],
        virtual_workers: int,
        exact: bool,
        topology: Sequence[Sequence[int]] = (),
        *,
        sends: bool = True,
    ) -> None:
        """Opens a generation. `shares[r]` are the ranges of virtual workers of rank r, `topology`
        that of the membership. `sends`: or else it only computes."""
        assert self._wire is None or exact  # `JobSpec` refuses fast mode with it
        self._plan = ReductionPlan(group, shares, virtual_workers, exact, topology)
        self._sends = sends
        self._lay_out()

    def close(self) -> None:
        """Closes the generation. Operations in flight keep their buffers."""
        self._running = False
        self._plan = self._error = None  # its traceback may be the last to hold a communicator
        self._clear()
        if self._sends:
            self.exchange.close()

    def preallocate(self, virtual_workers: int) -> None:
        """Touches memory for buffers before a group needs it."""
        self._arrange()
        self.exchange.preallocate(self._layout, virtual_workers)

    def _lay_out(self) -> None:
        """Makes the buffers. Raises GroupAborted, and ClusterError if the host has no memory."""
        assert self._plan is not None
        self._arrange()
        self._next = 0
        if self._sends:
            self.exchange.open(self._plan, self._layout)

    def _arrange(self) -> None:
        """Creates buckets for the parameters that require a gradient now."""
        if self._layout.fits(self._all):
            return
        self._remove_hooks()
        self._layout = GradientLayout(self._all, self._wire)
        count = len(self._layout.parameters)
        self._own_hooks = [0] * count
        if self._computes:
            self._refuse_hooks()
            # The first backward pass shows in which order gradients come.
            for index in range(count):
                self._add_hook(index, self._arrivals.append)
            self._add_note()
        self.exchange.forget_memory()
        self._used, self._in_last = bytearray(count), bytearray(count)

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._own_hooks = [], [0] * len(self._own_hooks)
        self._arrivals = []

    def _add_hook(self, index: int, hook: Any) -> None:
        added = self._layout.parameters[index].register_post_accumulate_grad_hook(hook)
        self._hooks.append(added)
        self._own_hooks[index] += 1

    def _add_note(self) -> None:
        """Lets `note` hear of each gradient, in every backward pass."""
        note = self._note
        if note is None:
            return

        def noted(index: int, parameter: torch.Tensor) -> None:
            if self._running:
                note(index)

        for index in range(len(self._layout.parameters)):
            self._add_hook(index, partial(noted, index))

    def _place_hooks(self) -> None:
        """Puts one hook on each bucket, on the parameter whose gradient came last."""
        came = {p: number for number, p in enumerate(self._arrivals)}
        self._remove_hooks()
        self._add_note()
        for bucket in self._layout.buckets:
            numbers = [came.get(p, -1) for p in bucket.parameters]
            self._add_hook(bucket.first + numbers.index(max(numbers)), self._launch_complete)

    # ----------------------------------------------------------------------------- step

    def begin(self, seed: int = 0, *, early: bool = True) -> None:
        """Starts a step. Follows changes of `requires_grad`. `seed`: for what is drawn in this step
        to round gradients. `early`: buckets are sent while the last backward pass runs."""
        assert self._plan is not None
        if not self._layout.fits(self._all):
            self._lay_out()
        if self._arrivals:
            self._place_hooks()
        self.drop()
        self._layout.begin(seed)
        self.late, self._is_last, self._error = False, False, None
        self._used[:] = bytes(len(self._used))
        self._early = early
        self._next = 0
        if self._sends:
            self.exchange.begin()

    def drop(self) -> None:
        """Drops every gradient, also those of a step that was not committed."""
        self._running = False
        self._clear()
        for p in self._all:
            p.grad = None

    def _clear(self) -> None:
        self._stack.clear()
        self._last, self._merges = None, 0

    def before_leaf(self, leaf: TreeLeaf, is_last: bool) -> None:
        """Prepares for the forward pass of `leaf`."""
        assert self._plan is not None
        merges = leaf.merges if self._plan.exact else min(1, len(self._stack))
        v = leaf.virtual_worker
        self._node, self._merges, self._is_last, self._last = (v, v + 1), merges, is_last, None

    def add_finished(self, node: Node, gradients: Gradients, merges: int, is_last: bool) -> None:
        """Adds the sum of a finished node in place of its leaves. `gradients` are given up.
        `merges`: how many sums before it the node is added to. `is_last`: no leaf comes after it.
        """
        self._begin(node, merges, is_last)
        is_complete = self._note_used(gradients, 0)
        if is_last:
            self._last = gradients  # `send` takes it
        else:
            self._push(gradients, is_complete)

    def add_leaf(
        self, leaf: TreeLeaf, gradients: Mapping[torch.Tensor, torch.Tensor], is_last: bool
    ) -> None:
        """Adds a leaf whose gradients, by parameter, are given up."""
        v, given = leaf.virtual_worker, [gradients.get(p) for p in self._layout.parameters]
        self.add_finished((v, v + 1), given, leaf.merges, is_last)

    def _begin(self, node: Node, merges: int, is_last: bool) -> None:
        self._node, self._merges, self._is_last = node, merges, is_last
        self._last = None

    def before_backward(self) -> None:
        """Takes the gradients of a backward pass. Raises LossError if there are some."""
        self.check_after_loss()
        if self._arrivals:
            self._place_hooks()
        self._running = True

    def check_after_loss(self) -> None:
        """Raises LossError if the loss function left a gradient."""
        if [*map(_gradient, self._all)].count(None) < len(self._all):
            p = next(p for p in self._all if p.grad is not None)
            raise LossError(
                f"the loss function left a gradient in model.{self._names[p]}.grad: it called "
                "backward(), or assigned it. Return the loss, whose backward pass is run for "
                "you; within a loss use torch.autograd.grad"
            )

    def after_leaf(
        self, leaf: TreeLeaf, is_last: bool, *, observed: bool = False
    ) -> dict[torch.Tensor, torch.Tensor | None]:
        """Adds the gradients after the backward pass, also of a leaf that contributes nothing.
        Returns them, by parameter, if they are `observed`, which needs a step that is not `early`.
        """
        self._running = False
        if self._layout.frozen:
            self.check_after_backward()
        for bucket in self._layout.buckets[: self._next if is_last else 0]:
            for p in bucket.parameters:
                if p.grad is not None:  # it came after its bucket was sent
                    self.late, p.grad = True, None
        found: dict[torch.Tensor, torch.Tensor | None] = {}
        if observed:
            found |= {p: local_of(p.grad) for p in self._layout.parameters}
        if not is_last:
            gradients = self._take(self._layout.parameters)
            self._push(gradients, self._note_used(gradients, 0))
        return found

    def check_after_backward(self) -> None:
        """Raises LossError if a parameter has a gradient that required none."""
        for p in self._layout.frozen:
            if p.grad is not None:
                raise LossError(
                    f"model.{self._names[p]} did not require a gradient when the step began, and "
                    "the loss function gave it one: call requires_grad_() before the loop over "
                    "ctx.steps, or in its body"
                )

    def send(self) -> None:
        """Launches every bucket that is not launched yet, after the last leaf. Raises ModelError if
        other code has hooks that saw the gradients."""
        if self._computes:
            self._refuse_hooks()
        while self._sends and self._next < len(self._layout.buckets):
            self._flush(self._layout.buckets[self._next])
        if self._error is not None:
            raise self._error

    def finished(self) -> dict[Node, Gradients]:
        """Returns the sums of this worker's subtrees that are finished, after the step was aborted.
        They are right as long as the step's inputs are; see `FinishedWork`."""
        plan = self._plan
        if plan is None or not plan.exact or not plan.subtrees or self.late:
            return {}
        sent = self._sends and self._is_last and self._next == len(self._layout.buckets)
        if sent and (views := self.exchange.last_subtree()) is not None:
            found = {one.node: one.gradients for one in self._complete()}
            found[self._completed_node] = [
                view if there else None for view, there in zip(views, self._in_last, strict=True)
            ]
            return found
        return {one.node: one.gradients for one in self._stack}

    def take_sums(self) -> dict[Node, Gradients]:
        """Returns the sums of this worker's subtrees after its last leaf, and drops them here.
        Raises ModelError if other code has hooks that saw the gradients."""
        self._refuse_hooks()
        sums = {one.node: one.gradients for one in self._stack}
        self.drop()
        return sums

    @property
    def parameters(self) -> tuple[int, ...]:
        """Returns the identities of the parameters that require a gradient, in layout order."""
        return tuple(map(id, self._layout.parameters))

    @property
    def used(self) -> bytes:
        """Returns a byte per parameter: 1 if a virtual worker of this rank gave it a gradient."""
        return bytes(self._used)

    # -------------------------------------------------------------------------- private

    def _refuse_hooks(self) -> None:
        """Raises ModelError if a parameter has a post-accumulate-grad hook of other code."""
        parameters = self._layout.parameters
        if sum(map(len, filter(None, map(_hooks_of, parameters)))) != len(self._hooks):
            pairs = zip(parameters, self._own_hooks, strict=True)
            p = next(p for p, own in pairs if len(_hooks_of(p) or ()) != own)
            raise ModelError(
                f"model.{self._names[p]} has a post-accumulate-grad hook, which would see sums "
                "of as many micro-batches as this worker happens to run. Use register_hook, "
                "which sees the gradient of each micro-batch, or for that of the step "
                "clip_norm=, or optimizer.register_step_pre_hook"
            )

    def _take(self, parameters: Sequence[torch.nn.Parameter]) -> Gradients:
        """Takes the gradients of these parameters."""
        gradients: Gradients = list(map(_gradient, parameters))
        for p in parameters:
            p.grad = None
        if self._sharded:
            pairs = zip(gradients, parameters, strict=True)
            gradients = [local_of(placed_like(gradient, p)) for gradient, p in pairs]
        return gradients

    def _addresses(self, gradients: Gradients, first: int) -> set[int]:
        """Returns where gradients, of parameters from `first` on, begin in memory. An empty one has
        the address 0, and no memory. Raises ModelError."""
        try:
            return {*map(torch.Tensor.data_ptr, filter(is_given, gradients))} - {0}  # type: ignore[arg-type]
        except RuntimeError:
            for p, gradient in zip(self._layout.parameters[first:], gradients, strict=False):
                if gradient is not None and gradient.layout is not torch.strided:
                    raise ModelError(
                        f"model.{self._names[p]} has a sparse gradient; use Embedding(sparse=False)"
                    ) from None
            raise

    def _note_used(self, gradients: Gradients, first: int) -> bool:
        """Notes which parameters, from `first` on, have a gradient. Returns whether all have."""
        is_complete = all_present(gradients)
        if is_complete:
            self._used[first : first + len(gradients)] = b"\1" * len(gradients)
        else:
            for index, gradient in enumerate(gradients, first):
                if gradient is not None:
                    self._used[index] = 1
        return is_complete

    def _push(self, own: Gradients, is_complete: bool) -> None:
        """Adds a leaf, or a finished node in its place, to the sums that it completes."""
        addresses = self._addresses(own, 0)
        self._check_memory(own, addresses, 0)
        node, completed = self._node, self._stack[len(self._stack) - self._merges :]
        gradients = own
        for kind in self._layout.kinds:
            gradients = kind.rounded(gradients, node)
        for below in reversed(completed):
            node = (below.node[0], node[1])
            for kind in self._layout.kinds:
                here, blocks = slice(kind.first, kind.last), kind.first_blocks
                add_present(kind.rounding, below.gradients[here], gradients[here], node, blocks)
            if below.is_complete:
                gradients = below.gradients
            else:
                pairs = zip(below.gradients, gradients, strict=True)
                gradients = [b if a is None else a for a, b in pairs]
            is_complete = is_complete or below.is_complete or all_present(gradients)
        if graphs_are_replayed():  # the next replay writes to the memory of these gradients
            pairs = zip(gradients, own, strict=True)
            gradients = [g.clone() if g is not None and g is old else g for g, old in pairs]
        del self._stack[len(self._stack) - len(completed) :]
        if completed and completed[0].is_complete:
            addresses = completed[0].addresses  # which all was added to
        elif not all(map(operator.is_, gradients, own)):
            addresses = self._addresses(gradients, 0)
        self._stack.append(SubtreeSum(node, gradients, addresses, is_complete))
        self._merges = 0

    def _check_memory(self, gradients: Gradients, addresses: set[int], first: int) -> None:
        """Raises ModelError if a gradient, of parameters from `first` on, lies in the memory of a
        sum on the stack. `addresses`: of the gradients."""
        for one in self._stack:
            if not addresses.isdisjoint(one.addresses):
                index = next(
                    index
                    for index, gradient in enumerate(gradients, first)
                    if gradient is not None and gradient.data_ptr() in one.addresses
                )
                name = self._names[self._layout.parameters[index]]
                raise ModelError(
                    f"the gradient of model.{name} lies in the memory of an earlier "
                    "micro-batch's, which is still needed, as with "
                    "make_graphed_callables or a backward() that returns the same "
                    "tensor each time. Use "
                    'torch.compile(mode="reduce-overhead"), whose gradients are copied, or return '
                    "a new tensor"
                )

    def _complete(self) -> list[SubtreeSum]:
        """Returns the sums that the present leaf does not add to."""
        return self._stack[: len(self._stack) - self._merges]

    @property
    def _completed_node(self) -> Node:
        """The subtree whose sum the present leaf completes."""
        first = self._stack[-self._merges].node if self._merges else self._node
        return (first[0], self._node[1])

    def _launch_complete(self, parameter: torch.Tensor) -> None:
        """The hook of the buckets: in the last backward pass, launches those that are complete."""
        launches = self._running and self._is_last and self._sends
        launches = launches and self._early and not self.sequential
        while launches and self._next < len(self._layout.buckets):
            bucket = self._layout.buckets[self._next]
            if [p for p in bucket.parameters if p.grad is None]:
                return
            self._flush(bucket)

    def _flush(self, bucket: GradientBucket) -> None:
        """Writes this worker's sums of one bucket to its buffers and launches its exchange."""
        complete, of_subtrees = self._complete(), self.exchange.views(bucket)
        here = slice(bucket.first, bucket.last)
        for views, one in zip(of_subtrees, complete, strict=False):
            self._sum_up(bucket, views, one.gradients[here], one.node, ())
        given = self._last
        if given is None:
            leaf = self._take(bucket.parameters)
            self._note_used(leaf, bucket.first)
        else:
            leaf = given[here]
        if of_subtrees:
            self._check_memory(leaf, self._addresses(leaf, bucket.first), bucket.first)
            below = self._stack[len(complete) :]
            self._in_last[here] = self._sum_up(bucket, of_subtrees[-1], leaf, self._node, below)
        self._next += 1
        if self._error is not None:
            return
        try:
            self.exchange.bucket_ready(bucket)
        except GroupError as error:  # must not pass through autograd; `send` raises it
            self._error = error

    def _sum_up(
        self,
        bucket: GradientBucket,
        views: Sequence[torch.Tensor],
        gradients: Gradients,
        node: Node,
        below: Sequence[SubtreeSum],
    ) -> bytes:
        """Writes gradients of a bucket to `views`, added to the sums of `below`, which stay as they
        are. Returns a byte per parameter: whether any of them is there."""
        current: Gradients = [None] * len(views)  # the views that are written

        def write(given: Gradients) -> None:
            """Those of which nothing is written yet."""
            new = [i for i, one in enumerate(given) if one is not None and current[i] is None]
            if new:
                values, outs = [given[i] for i in new], [views[i] for i in new]
                blocks = [bucket.first_blocks[i] for i in new]
                bucket.rounding.write(values, node, blocks, outs)  # type: ignore[arg-type]
                for i in new:
                    current[i] = views[i]

        write(gradients)
        for one in reversed(below):
            node = (one.node[0], node[1])
            sums = one.gradients[bucket.first : bucket.last]
            add_present(bucket.rounding, current, sums, node, bucket.first_blocks)
            if not all_present(current):
                write(sums)
        for view, there in zip(views, current, strict=True):
            if there is None:
                view.fill_(-0.0)
        return bytes(map(is_given, current))
