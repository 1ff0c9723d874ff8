"""Which rows and which random numbers: pure arithmetic on (seed, step, virtual worker)."""

from elastic_dp.sampling.mixture import Mixture, MixtureSource
from elastic_dp.sampling.order import Order
from elastic_dp.sampling.packing import PackedOrder, Segments
from elastic_dp.sampling.seeds import batch_seed, body_seed, generator_for, seed_for

__all__ = [
    "Mixture",
    "MixtureSource",
    "Order",
    "PackedOrder",
    "Segments",
    "batch_seed",
    "body_seed",
    "generator_for",
    "seed_for",
]
