"""The optimizer's state divided among the members, each piece on two of them."""

from __future__ import annotations

from functools import partial

from elastic_dp.extensions.sharding.piece_reduction import PieceReduction
from elastic_dp.extensions.sharding.shardable_optimizers import check_shardable
from elastic_dp.extensions.sharding.sharded_optimizer import ShardedOptimizer
from elastic_dp.extensions.sharding.sharded_update import ShardedUpdate
from elastic_dp.train.step_builder import StepBuilder


def extend(build: StepBuilder) -> None:
    """Raises SpecError and ModelError."""
    check_shardable(build.given.optimizer, build.parameters, build.given.precision)
    build.holders = sharding = ShardedOptimizer(build.given.optimizer, build.parameters)
    build.new_exchange = partial(PieceReduction, sharding)

    def update() -> ShardedUpdate:
        assert isinstance(build.exchange, PieceReduction)
        return ShardedUpdate(
            sharding,
            build.exchange,
            build.state,
            build.weights,
            build.has_checkpoint,
            build.reporter.pass_point,
        )

    build.new_participants.append(update)
