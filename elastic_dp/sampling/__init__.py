"""Which rows and which random numbers: arithmetic on (seed, step, virtual worker), nothing else."""

from elastic_dp.sampling.mixture import Mixture, MixtureSource
from elastic_dp.sampling.order import Order
from elastic_dp.sampling.seeds import batch_seed, body_seed, generator_for, seed_for

__all__ = [
    "Mixture",
    "MixtureSource",
    "Order",
    "batch_seed",
    "body_seed",
    "generator_for",
    "seed_for",
]
