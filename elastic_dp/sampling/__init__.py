"""Which rows and which random numbers: arithmetic on (seed, step, virtual worker), nothing else."""

from elastic_dp.sampling.order import Order
from elastic_dp.sampling.seeds import body_seed, seed_for

__all__ = ["Order", "body_seed", "seed_for"]
