"""Seeds for user code: functions of the job's seed and the step, never of the worker that runs it.

The dropout of a virtual worker is the same on every machine, and again when its step is repeated.
The loop body runs once per worker and must be equal on all of them, so its seed does not
depend on a virtual worker. All seeds are 64-bit words, as `torch.manual_seed` takes them; NumPy's
legacy `seed` takes the low 32 bits.
"""

from __future__ import annotations

import numpy as np

from elastic_dp.sampling.keyed_permutation import derive

_FORWARD, _BODY, _TRANSFORM, _BATCH, _ROUNDING, _INNER = 1, 2, 3, 4, 5, 6


def seed_for(job_seed: int, step: int, virtual_worker: int) -> int:
    """Return the seed of the forward and backward pass of one virtual worker in `step` (from 1)."""
    return derive(_FORWARD, job_seed, step, virtual_worker)


def body_seed(job_seed: int, step: int) -> int:
    """Return the seed of the loop body after `step` (from 1; 0: the code before the first step)."""
    return derive(_BODY, job_seed, step)


def batch_seed(job_seed: int, step: int, virtual_worker: int) -> int:
    """Return the seed for user code that makes a micro-batch with the global generators.

    It differs from `seed_for`, so that dropout does not draw the same numbers again.
    """
    return derive(_BATCH, job_seed, step, virtual_worker)


def rounding_seed(job_seed: int, step: int) -> int:
    """Return the seed for the random rounding of the gradients of `step` (from 1)."""
    return derive(_ROUNDING, job_seed, step)


def inner_seed(job_seed: int, step: int, virtual_worker: int) -> int:
    """Return the seed of what makes the inner optimizer of one virtual worker in `step`."""
    return derive(_INNER, job_seed, step, virtual_worker)


def generator_for(job_seed: int, step: int, virtual_worker: int) -> np.random.Generator:
    """Return the generator for `transform(batch, rng)`, independent of the other seeds.

    No other thread uses it. NumPy promises that the bits of Philox are stable, but not the results
    of methods such as `normal` and `permutation`.
    """
    key = derive(_TRANSFORM, job_seed, step, virtual_worker)
    return np.random.Generator(np.random.Philox(key=key))
