"""The optimizer's state divided among the members, each piece on two of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from elastic_dp.extensions.sharding.piece_reduction import GatheredNorm, PieceReduction
from elastic_dp.extensions.sharding.shardable_optimizers import check_shardable
from elastic_dp.extensions.sharding.sharded_optimizer import ShardedOptimizer
from elastic_dp.train.step.participants import StepParticipant, Verdict
from elastic_dp.train.step_builder import StepBuilder


def extend(build: StepBuilder) -> None:
    """Raises SpecError and ModelError."""
    check_shardable(build.given.optimizer, build.parameters, build.given.precision)
    build.holders = sharding = ShardedOptimizer(build.given.optimizer, build.parameters)
    build.new_exchange = partial(PieceReduction, sharding)

    build.new_participants.append(lambda: ShardedUpdate(sharding, build))


class ShardedUpdate(StepParticipant):
    """What a step does where each member has a part of the optimizer's state: before its commit it
    updates copies of this member's parameters, and gathers those of all members. Comes after the
    gradient: both exchange before the commit."""

    name = "sharding"

    def __init__(self, sharding: ShardedOptimizer, build: StepBuilder) -> None:
        assert isinstance(build.exchange, PieceReduction)
        self._sharding, self._exchange, self._step = sharding, build.exchange, 0
        self._weights, self._has_checkpoint = build.weights, build.has_checkpoint
        self._parameters = list(build.parameters.values())
        self._pass_point = build.reporter.pass_point

    def begin(self, step: int) -> None:
        self._step = step
        self._sharding.begin()

    def agree(self, proposals: Sequence[bytes]) -> Verdict:
        self._sharding.take_copies()
        return None

    def prepare(self) -> None:
        norm, sharding, step = self._exchange.norm, self._sharding, self._step
        if not isinstance(norm, GatheredNorm) or self._exchange.finite is False:
            return
        gradients, memory = self._exchange.gradients(), self._exchange.received_memory
        sharding.prepare(step, gradients, self._exchange.used, memory)
        self._pass_point("prepared", step)
        keeps = self._has_checkpoint(step)
        differing = sharding.gather(
            norm, compares=self._weights.compares_updates(step, keeps=keeps)
        )
        self._exchange.agree_finite()
        if self._exchange.finite:
            self._weights.compare_updates(step, differing)
            self._pass_point("gathered", step)

    def update(self) -> None:
        self._sharding.step_ends([p.grad for p in self._parameters])
        for p in self._parameters:  # the optimizer updates nothing; schedulers look for its step
            p.grad = None

    def stopped(self) -> None:
        self._sharding.copy_rest()
