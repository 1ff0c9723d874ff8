"""Adds up the gradients of V virtual workers across the members of a generation, during backward.

Exact mode adds along the fixed tree of reduction_tree.py: the sum has the same bits for every world
size. A worker adds its own subtrees as it computes, each gradient in its own hook
(`LocalReduction`). In the backward pass of its last leaf, every bucket that is complete is sent
(`BucketReduction`).

The invariants are:

- User code never sees the gradient of another micro-batch: `p.grad` is None when a loss function
  and its backward pass begin. A gradient that a loss function leaves there is an error, and so is a
  post-accumulate-grad hook other than ours.
- Buckets are launched in index order, the same on every rank. A bucket is launched early only when
  each of its parameters has fired. A parameter that fires twice in one backward (tied weights under
  reentrant checkpointing do) invalidates the step (`late`): it may have been sent too early, or
  added to its neighbour in parts. From then on (`sequential`) nothing is launched before backward
  has ended, and every leaf is added as a whole.
- An absent gradient travels as -0.0, neutral in IEEE addition: x + -0.0 is x, also for x = -0.0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from elastic_dp.distributed.cross_worker_reduction import (
    BucketReduction,
    GradientBufferPool,
    ReductionPlan,
)
from elastic_dp.distributed.gradient_buckets import GradientLayout
from elastic_dp.distributed.gradient_order import GradientOrder
from elastic_dp.distributed.leaf_square import LeafSquare
from elastic_dp.distributed.local_reduction import Gradients, LocalReduction
from elastic_dp.distributed.local_shards import is_sharded, local_of, placed_like, sharded_like
from elastic_dp.distributed.memory_shortage import allocate_buffers, are_large
from elastic_dp.distributed.piece_routes import HeldRanges
from elastic_dp.distributed.process_group import ProcessGroup
from elastic_dp.distributed.received_memory import ReceivedMemory
from elastic_dp.distributed.reduction_tree import Leaf, Node, Share
from elastic_dp.errors import GroupError, LossError, ModelError


class GradientReducer:
    """Adds up gradients for one model, with the buffers and collectives of the open generation."""

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        wire: str | None = None,
        order: GradientOrder | None = None,
        *,
        computes: bool = True,
    ) -> None:
        """`wire`: of the job. `order`: notes that of a step's gradients.

        In exact mode two may share the work: one sends none of its sums, which `take_sums` returns,
        and the other one, which `computes` nothing, what `add_finished` gives it.
        """
        self._wire, self.order = wire, order
        self._computes, self._sends = computes, True
        self._names = {p: name for name, p in parameters.items()}
        self._all = list(self._names)
        self._sharded = any(map(is_sharded, self._all))
        self._layout = GradientLayout([])
        self._hooks: list[Any] = []
        self._plan: ReductionPlan | None = None  # of the present generation
        self._exchanges: list[BucketReduction] = []  # by the number of the bucket
        self._turns: list[BucketReduction] = []  # in the order in which they are reduced
        self._pool, self._received = GradientBufferPool(), ReceivedMemory()
        self._sums = LocalReduction(lambda index: self._names[self._layout.parameters[index]])
        # Whether a parameter has a gradient, and in the last subtree.
        self._used, self._in_last = bytearray(), bytearray()
        self.sequential = self.late = False
        # Hooks act only within a step's backward passes, and launch only in the last one.
        self._running = self._is_last = False
        self._next = self._turns_taken = 0  # the first that is not launched, and not taken
        self._error: GroupError | None = None
        self._square: LeafSquare | None = None  # in steps that measure it

    # ----------------------------------------------------------------------- generation

    def open(
        self,
        group: ProcessGroup,
        shares: Sequence[Share],
        virtual_workers: int,
        exact: bool,
        topology: Sequence[Sequence[int]] = (),
        needed: HeldRanges | None = None,
        sends: bool = True,
    ) -> None:
        """Opens a generation. `shares[r]` are the ranges of virtual workers of rank r, `topology`
        that of the membership. `needed`: which ranks need the sum of which elements; None: all need
        all. `sends`: or else it only computes."""
        assert self._wire is None or exact  # `JobSpec` refuses fast mode with it
        plan = group, shares, virtual_workers, exact, topology, needed
        self._plan = ReductionPlan(*plan)
        self._sends = sends
        self._lay_out()

    def close(self, *, keeps_memory: bool = True) -> None:
        """Closes the generation. Operations in flight keep their buffers."""
        self._running = False
        self._received.close()
        self._plan = self._error = None  # its traceback may be the last to hold a communicator
        self._sums.clear()
        for exchange in self._exchanges:
            exchange.release(self._pool)
        self._pool = self._pool if keeps_memory else GradientBufferPool()
        self._exchanges, self._turns = [], []

    def preallocate(self, virtual_workers: int, *, receives: bool = True) -> None:
        """Touches memory for buffers before a group needs it, also for what it `receives`."""
        self._arrange()
        self._pool.preallocate(self._layout.buckets, virtual_workers, receives=receives)

    @property
    def is_large(self) -> bool:
        """Whether the buffers take much memory of the host."""
        return are_large(p for p in self._all if p.requires_grad)

    def _lay_out(self) -> None:
        """Makes the buffers. Raises GroupAborted, and ClusterError if the host has no memory."""
        assert self._plan is not None
        self._arrange()
        allocate_buffers(self._allocate, self._plan.on_host.check, self._is_withheld)

    def _is_withheld(self) -> bool:
        return self.is_large and (self._pool.is_withheld or self._received.is_withheld)

    def _allocate(self) -> None:
        assert self._plan is not None
        self._exchanges = []
        self._pool.collect()
        given = self._received.open(self._plan, self._layout.buckets)
        self._exchanges = [
            BucketReduction(self._plan, bucket, self._pool, *given.get(bucket.number, ()))
            for bucket in (self._layout.buckets if self._sends else ())
        ]
        self._turns = [one for _ in self._plan.rounds or (None,) for one in self._exchanges]
        self._next = 0
        self._pool.keep_host_memory_only()
        if given:
            self._pool.clear()  # it has memory to receive in, too

    def _arrange(self) -> None:
        """Creates hooks and buckets for the parameters that require a gradient now."""
        if self._layout.fits(self._all):
            return
        for hook in self._hooks:
            hook.remove()
        self._layout = GradientLayout(self._all, self._wire)
        self._hooks = []
        if self._computes:
            self._refuse_hooks(0)
            self._hooks = [
                p.register_post_accumulate_grad_hook(self._hook(i))
                for i, p in enumerate(self._layout.parameters)
            ]
        self._pool.clear()
        self._used = bytearray(len(self._layout.parameters))
        self._in_last = bytearray(len(self._layout.parameters))

    # ----------------------------------------------------------------------------- step

    def begin(self, seed: int = 0, *, measures: bool = False) -> None:
        """Starts a step. Follows changes of `requires_grad`. `seed`: for what is drawn in this step
        to round gradients. `measures`: for `leaf_square`."""
        assert self._plan is not None
        if not self._layout.fits(self._all):
            self._lay_out()
        self.drop()
        self._layout.begin(seed)
        if self.order is not None:
            self.order.begin()
        self.late, self._is_last, self._error = False, False, None
        self._used[:] = bytes(len(self._used))
        self._square = LeafSquare(self._layout.parameters) if measures else None
        self._next = self._turns_taken = 0
        for exchange in self._exchanges:
            exchange.begin()

    def drop(self) -> None:
        """Drops every gradient, also those of a step that was not committed."""
        self._running = False
        self._sums.clear()
        for p in self._all:
            p.grad = None

    def before_leaf(self, leaf: Leaf, is_last: bool) -> None:
        """Prepares for the forward pass of `leaf`."""
        assert self._plan is not None
        merges = leaf.merges if self._plan.exact else min(1, len(self._sums))
        v = leaf.virtual_worker
        self._begin((v, v + 1), merges, is_last)

    def add_finished(self, node: Node, gradients: Gradients, merges: int, is_last: bool) -> None:
        """Adds the sum of a finished node in place of its leaves. `gradients` are given up.

        `merges`: how many sums before it the node is added to. `is_last`: no leaf comes after it.
        """
        for index, (p, gradient) in enumerate(zip(self._layout.parameters, gradients, strict=True)):
            if is_last and gradient is not None:  # it stays as it is when it is rounded again
                rounding = self._layout.bucket_of[index].rounding
                gradients[index] = rounding.gradient(gradient, p)
        self._add_given(node, gradients, merges, is_last)

    def add_leaf(
        self, leaf: Leaf, gradients: Mapping[torch.Tensor, torch.Tensor], is_last: bool
    ) -> None:
        """Adds a leaf whose gradients are not those of one backward pass, by parameter. They are
        given up."""
        v, given = leaf.virtual_worker, [gradients.get(p) for p in self._layout.parameters]
        self._add_given((v, v + 1), given, leaf.merges, is_last)

    def _add_given(self, node: Node, given: Gradients, merges: int, is_last: bool) -> None:
        self._begin(node, merges, is_last)
        for index, (p, gradient) in enumerate(zip(self._layout.parameters, given, strict=True)):
            self._used[index] |= gradient is not None
            if is_last:
                p.grad = gradient  # `send` takes it
            else:
                self._sums.add_gradient(index, gradient)
        if not is_last:
            self._sums.end_leaf()

    def _begin(self, node: Node, merges: int, is_last: bool) -> None:
        self._sums.begin_leaf(self._layout.roundings, merges, node)
        self._is_last = is_last
        if self._square is not None:
            self._square.begin()
        for exchange in self._exchanges:
            exchange.begin_leaf()

    def before_backward(self) -> None:
        """Takes the gradients of a backward pass. Raises what `check_after_loss` raises."""
        self.check_after_loss()
        self._running = True

    def check_after_loss(self) -> None:
        """Raises LossError or ModelError if there are gradients, or hooks of other code."""
        for p in self._all:
            if p.grad is not None:
                raise LossError(
                    f"the loss function left a gradient in model.{self._names[p]}.grad: it called "
                    "backward(), or assigned it. Return the loss, whose backward pass is run for "
                    "you; within a loss use torch.autograd.grad"
                )
        self._refuse_hooks(1)

    def after_leaf(self, leaf: Leaf, is_last: bool) -> None:
        """Adds the gradients after the backward pass, also of a leaf that contributes nothing."""
        self._running = False
        self.check_after_backward()
        if self._square is not None:
            for i, p in enumerate(self._layout.parameters):
                if p.grad is not None:  # its hook has not taken it
                    self._square.add(i, local_of(p.grad))
        if is_last:
            return
        sums = self._sums
        for i, p in enumerate(self._layout.parameters):
            if self.sequential or (sums.merges and not sums.fired[i]):
                sums.add_gradient(i, local_of(p.grad))
                p.grad = None
        sums.end_leaf()

    def check_after_backward(self) -> None:
        """Raises LossError if a parameter has a gradient that required none."""
        for p in self._layout.frozen:
            if p.grad is not None:
                raise LossError(
                    f"model.{self._names[p]} did not require a gradient when the step began, and "
                    "the loss function gave it one: call requires_grad_() before the loop over "
                    "ctx.steps, or in its body"
                )

    def leaf_square(self) -> torch.Tensor:
        """Returns the sum of squares of the gradient of the leaf that has just ended."""
        assert self._square is not None
        return self._square.total()

    def send(self) -> None:
        """Launches every bucket that is not launched yet, after the last leaf."""
        while self._next < len(self._exchanges):
            self._flush(self._exchanges[self._next])
        if self._error is not None:
            raise self._error

    def finished(self) -> dict[Node, Gradients]:
        """Returns the sums of this worker's subtrees that are finished, after the step was aborted.

        They are right as long as the step's inputs are; see `finished_work`.
        """
        plan = self._plan
        if plan is None or not plan.exact or self.sequential or self.late:
            return {}
        found = self._sums.finished()
        sent = self._is_last and self._next == len(self._exchanges)
        if sent and all(exchange.holds_last_subtree for exchange in self._exchanges):
            views = [view for exchange in self._exchanges for view in exchange.keep_last_subtree()]
            found[self._sums.node] = [
                view if there else None for view, there in zip(views, self._in_last, strict=True)
            ]
        return found

    def take_sums(self) -> dict[Node, Gradients]:
        """Returns the sums of this worker's subtrees after its last leaf, and drops them here."""
        sums = self._sums.finished()
        self.drop()
        return sums

    def reduce(self) -> None:
        """Finishes the sums of this rank's parts and sends them, bucket by bucket as they
        arrive."""
        while self._turns_taken < len(self._turns):
            self._take_turn()

    def advance(self) -> None:
        """Does as much of `reduce`, after `send`, as need not wait for other ranks."""
        turns, is_sent = self._turns, self._next == len(self._exchanges)
        while is_sent and self._turns_taken < len(turns) and turns[self._turns_taken].has_arrived:
            self._take_turn()

    def _take_turn(self) -> None:
        self._turns[self._turns_taken].reduce()
        self._turns_taken += 1

    def settle(self) -> None:
        """Waits for what was sent, so that this generation can fill the buffers again."""
        for exchange in self._exchanges:
            exchange.settle()

    def add_sequentially(self) -> None:
        """Makes later attempts sequential, after a parameter fired twice in one backward."""
        self.sequential = True

    def complete(self, factor: float) -> bool:
        """Waits until the finished parts of all ranks have arrived and multiplies them by `factor`.

        Returns whether all sums are finite, the same on every rank.
        """
        for exchange in self._exchanges:
            exchange.arrive()
            exchange.scale(factor)
        if all(exchange.totals_are_finite() for exchange in self._exchanges):
            return True
        return all(exchange.is_finite() for exchange in self._exchanges)

    def complete_held(self, factor: float) -> dict[int, torch.Tensor]:
        """Instead of `complete` where not all members need all sums: returns those that this rank
        needs, by number of the piece and multiplied by `factor`, each of shape (numel,)."""
        for exchange in self._exchanges:
            exchange.arrive()
            exchange.scale_on_device(factor)
        return self.held()

    def held(self) -> dict[int, torch.Tensor]:
        """Returns what `complete_held` does, on a device, after `finish`."""
        return {piece: flat for one in self._exchanges for piece, flat in one.held().items()}

    @property
    def received_memory(self) -> Mapping[torch.dtype, torch.Tensor]:
        """Memory by dtype that is free from `complete_held` until the next step begins."""
        return self._received.by_dtype

    def used_parameters(self, used: Sequence[int]) -> set[torch.Tensor]:
        """Returns the parameters that have a gradient in this step. `used`: see `assign`."""
        return {p for p, flag in zip(self._layout.parameters, used, strict=True) if flag}

    def arrive(self) -> list[torch.Tensor]:
        """On a device, instead of `complete`, whose waits would stop the host: orders what follows
        behind the finished parts of all ranks. Returns for each bucket what `finish` needs to know
        of it."""
        for exchange in self._exchanges:
            exchange.arrive()
        return [exchange.extremes() for exchange in self._exchanges]

    def finish(self, factor: float, extremes: Sequence[torch.Tensor]) -> bool:
        """Multiplies the sums by `factor`. Returns whether they are finite, the same on every rank.

        `extremes` are those of `arrive`, on the host. They are rounded as all elements are, so
        where they are finite, all elements are.
        """
        for exchange in self._exchanges:
            exchange.scale_on_device(factor)
        return all(math.isfinite(x) for pair in extremes for x in pair.mul(factor).tolist())

    def assign(self, used: Sequence[int]) -> None:
        """Gives every used parameter its gradient, a view into the buckets. The others keep None.

        The gradients are valid until the next `begin` or `open`.
        """
        for flag, (p, view) in zip(used, self.totals(), strict=True):
            gradient = sharded_like(view, p) if self._sharded else view
            p.grad = gradient if flag else None

    def totals(self) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
        """Yields the parameters in layout order, each with its finished sum."""
        for exchange in self._exchanges:
            yield from zip(exchange.bucket.parameters, exchange.total_views, strict=True)

    @property
    def parameters(self) -> tuple[int, ...]:
        """Returns the identities of the parameters that require a gradient, in layout order."""
        return tuple(map(id, self._layout.parameters))

    @property
    def used(self) -> bytes:
        """Returns a byte per parameter: 1 if a virtual worker of this rank gave it a gradient."""
        return bytes(self._used)

    # -------------------------------------------------------------------------- private

    def _refuse_hooks(self, ours: int) -> None:
        """Raises ModelError if a parameter has a post-accumulate-grad hook of other code."""
        for p in self._layout.parameters:
            if len(p._post_accumulate_grad_hooks or ()) > ours:
                raise ModelError(
                    f"model.{self._names[p]} has a post-accumulate-grad hook, which would see sums "
                    "of as many micro-batches as this worker happens to run. Use register_hook, "
                    "which sees the gradient of each micro-batch, or for that of the step "
                    "clip_norm=, or optimizer.register_step_pre_hook"
                )

    def _hook(self, index: int) -> Any:
        number, sums = self._layout.bucket_of[index].number, self._sums

        def fired(parameter: torch.nn.Parameter) -> None:
            if not self._running:
                return
            gradient = parameter.grad
            if self._sharded:
                parameter.grad = gradient = placed_like(gradient, parameter)
                gradient = local_of(gradient)
            if gradient is not None and gradient.is_sparse:
                name = self._names[parameter]
                raise ModelError(f"model.{name} has a sparse gradient; use Embedding(sparse=False)")
            self._used[index] = 1
            if self.order is not None:
                self.order.note(index)
            if self.sequential:
                return  # `after_leaf` and `send` take it when it is complete
            if not sums.fire(index):
                self.late, parameter.grad = True, None
                return
            if self._square is not None and gradient is not None:
                self._square.add(index, gradient)
            if not self._is_last:
                sums.add_gradient(index, gradient)
                parameter.grad = None
                return
            exchange = self._exchanges[number]
            # Now, while the gradient is in the cache.
            self._write_last(exchange, index, parameter)
            if exchange.fired():
                while self._next < len(self._exchanges) and self._exchanges[self._next].is_full:
                    self._flush(self._exchanges[self._next])

        return fired

    def _flush(self, exchange: BucketReduction) -> None:
        """Writes this worker's sums of one bucket to its buffers and launches its exchange."""
        bucket, sums = exchange.bucket, self._sums
        for views, complete in zip(exchange.views, sums.complete(), strict=False):
            for view, one in zip(views, complete[bucket.first : bucket.last], strict=True):
                _write(view, one)
        for index, p in enumerate(bucket.parameters, bucket.first):
            if self.sequential or not sums.fired[index]:
                self._write_last(exchange, index, p)
        self._next += 1
        if self._error is not None:
            return
        try:
            exchange.launch()
        except GroupError as error:  # must not pass through autograd; `send` raises it
            self._error = error

    def _write_last(self, exchange: BucketReduction, index: int, p: torch.Tensor) -> None:
        """Writes a parameter's gradient of the last subtree, added to the sums on the stack."""
        view = exchange.views[-1][index - exchange.bucket.first]
        value = self._sums.sum_gradient(index, local_of(p.grad), out=view)
        self._in_last[index] = value is not None
        _write(view, value)
        p.grad = None


def _write(view: torch.Tensor, value: torch.Tensor | None) -> None:
    if value is None:
        view.fill_(-0.0)
    elif value is not view:
        view.copy_(value)
