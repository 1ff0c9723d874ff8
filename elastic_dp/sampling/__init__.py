"""Which rows and which random numbers: pure arithmetic on (seed, step, virtual worker)."""

from elastic_dp.sampling.growing_order import AnyOrder, GrowingOrder
from elastic_dp.sampling.leaving_out import without
from elastic_dp.sampling.mixture import Mixture, MixtureSource
from elastic_dp.sampling.order import Order
from elastic_dp.sampling.packing import PackedOrder, Segments
from elastic_dp.sampling.seeds import batch_seed, body_seed, generator_for, seed_for
from elastic_dp.sampling.step_schedule import StepSchedule

__all__ = [
    "AnyOrder",
    "GrowingOrder",
    "Mixture",
    "MixtureSource",
    "Order",
    "PackedOrder",
    "Segments",
    "StepSchedule",
    "batch_seed",
    "body_seed",
    "generator_for",
    "seed_for",
    "without",
]
