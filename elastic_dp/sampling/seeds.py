"""Seeds for user code: a function of the job's seed and the step, never of the worker that runs it.

A virtual worker's dropout is the same on whatever machine it lands, and again when its step is
redone (I2). The body of the loop runs once per worker and must be equal on all of them, so its seed
has no virtual worker. All are 64-bit words, as `torch.manual_seed` takes them; NumPy's old `seed`
takes the low 32 bits.
"""

from __future__ import annotations

import numpy as np

from elastic_dp.sampling.generator import derive

_FORWARD, _BODY, _TRANSFORM, _BATCH = 1, 2, 3, 4


def seed_for(job_seed: int, step: int, virtual_worker: int) -> int:
    """For the forward and backward pass of one virtual worker in `step` (from 1)."""
    return derive(_FORWARD, job_seed, step, virtual_worker)


def body_seed(job_seed: int, step: int) -> int:
    """For the loop's body after `step` (from 1; 0: what runs before the first step)."""
    return derive(_BODY, job_seed, step)


def batch_seed(job_seed: int, step: int, virtual_worker: int) -> int:
    """For user code that makes a micro-batch with global generators: not those numbers that dropout
    draws then."""
    return derive(_BATCH, job_seed, step, virtual_worker)


def generator_for(job_seed: int, step: int, virtual_worker: int) -> np.random.Generator:
    """For `transform(batch, rng)`: its own stream, independent of `seed_for`'s, as no thread shares
    it.

    NumPy promises that Philox keeps its bits; not that what a method of the generator (`normal`,
    `permutation`) makes of them never changes with NumPy's version.
    """
    key = derive(_TRANSFORM, job_seed, step, virtual_worker)
    return np.random.Generator(np.random.Philox(key=key))
