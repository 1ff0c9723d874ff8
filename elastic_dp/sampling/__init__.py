"""Which rows and which random numbers: arithmetic on (seed, step, virtual worker), nothing else."""

from elastic_dp.sampling.mixture import Mixture, Source
from elastic_dp.sampling.order import Order
from elastic_dp.sampling.seeds import batch_seed, body_seed, generator_for, seed_for

__all__ = ["Mixture", "Order", "Source", "batch_seed", "body_seed", "generator_for", "seed_for"]
