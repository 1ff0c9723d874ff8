"""The exchange of gradients where each member updates its pieces: it gets the sums of these alone.

With one member or two, all hold everything, and it is an exchange as without sharding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch

from elastic_dp.distributed.cross_worker_reduction import BucketReduction
from elastic_dp.distributed.gradient_buckets import GradientBucket, GradientLayout
from elastic_dp.distributed.gradient_exchange import GradientExchange
from elastic_dp.distributed.gradient_norm import NO_CLIPPING, GradientClipping
from elastic_dp.distributed.piece_assignment import Holders
from elastic_dp.distributed.piece_routes import HeldRanges
from elastic_dp.extensions.sharding.piece_norm import GatheredNorm, PieceNorm
from elastic_dp.extensions.sharding.pieces import StatePiece
from elastic_dp.extensions.sharding.received_memory import BucketMemory, ReceivedMemory


class Holding(Protocol):
    """Who holds which pieces in this generation; see `ShardedOptimizer`."""

    pieces: list[StatePiece]
    holders: list[Holders]

    def needed(self) -> HeldRanges | None: ...


class PieceReduction(GradientExchange):
    """`norm` is a `GatheredNorm` where this member has pieces only, and `finite` not known then,
    unless the gradient is clipped by it."""

    def __init__(
        self,
        holding: Holding,
        parameters: Iterable[torch.nn.Parameter],
        *,
        clipping: GradientClipping = NO_CLIPPING,
        writes_to_gradients: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__(parameters, clipping=clipping, writes_to_gradients=writes_to_gradients)
        self._holding, self._received = holding, ReceivedMemory()
        self._memory: Mapping[int, BucketMemory] = {}  # by bucket; empty: all hold everything
        self._norms: PieceNorm | None = None  # of this generation
        self._held: dict[int, torch.Tensor] = {}
        self.used: set[torch.nn.Parameter] = set()  # those with a gradient

    def preallocate(self, layout: GradientLayout, virtual_workers: int) -> None:
        # What is received lies in one piece of memory.
        self._pool.preallocate(layout.buckets, virtual_workers, receives=False)

    def close(self) -> None:
        self._received.close()
        super().close()
        self._memory = {}

    @property
    def received_memory(self) -> Mapping[torch.dtype, torch.Tensor]:
        """Memory by dtype that is free from `finish` until the next step begins."""
        return self._received.by_dtype

    def _is_withheld(self) -> bool:
        return super()._is_withheld() or (self.is_large and self._received.is_withheld)

    def _allocate(self) -> None:
        assert self._plan is not None
        needed = self._holding.needed()
        self._buckets = []
        self._memory = self._received.open(self._plan, self._layout.buckets, needed)
        super()._allocate()
        if self._memory:
            self._pool.clear()  # there is other memory to receive in
            holding = self._holding
            self._norms = PieceNorm(self._plan.on_host, self._all, holding.pieces, holding.holders)

    def _reduction(self, bucket: GradientBucket) -> BucketReduction:
        assert self._plan is not None
        given = self._memory.get(bucket.number, ())
        return BucketReduction(self._plan, bucket, self._pool, *given)

    def _drop(self) -> None:
        super()._drop()
        self._held, self.used = {}, set()

    @torch.no_grad()
    def finish(self, factor: float, used: Sequence[int]) -> None:
        if not self._memory:
            super().finish(factor, used)
            return
        assert self._plan is not None and self._norms is not None
        sums, finite = self.sums_of_pieces(factor)
        self.used = {p for p, flag in zip(self._layout.parameters, used, strict=True) if flag}
        pieces = self._holding.pieces
        held = {n: flat for n, flat in sums.items() if self._all[pieces[n].parameter] in self.used}
        wide = any(p.dtype == torch.float64 for p in self.used)
        self.norm = norm = self._norms.launch(held, wide=wide, finite=finite)
        # A tensor without dimensions is clipped in another way than one of one element.
        self._held = {
            n: pieces[n].within(flat, self._all[pieces[n].parameter]) for n, flat in held.items()
        }
        if self._clipping.norm is not None:
            _ = norm.square
            if not self._plan.on_device:
                norm.read()
                self.finite = norm.agree_finite()
        if self.finite is not False:
            self._clipping.clip(self._held.values(), norm)

    def sums_of_pieces(self, factor: float) -> tuple[dict[int, torch.Tensor], bool | None]:
        """Waits for the sums of the pieces that this member holds. Returns them, multiplied by
        `factor`, each of shape (numel,), and whether they are finite. None: not known, and they are
        on the host."""
        assert self._plan is not None
        finite = None
        if self._plan.on_device:
            finite = self._complete(factor)
        else:
            for one in self._buckets:
                one.arrive()
                one.scale_on_device(factor)
        return {n: flat for one in self._buckets for n, flat in one.held().items()}, finite

    def gradients(self) -> Mapping[Any, torch.Tensor]:
        return self._held if self._memory else super().gradients()

    def agree_finite(self) -> None:
        """Sets `finite`, once the norm is on the host. Raises GroupError."""
        assert isinstance(self.norm, GatheredNorm) and self._plan is not None
        self.finite = self.norm.agree_finite(confirms=self._plan.on_device)
