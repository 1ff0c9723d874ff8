"""The global random generators of Python, NumPy and torch, which user code may draw from."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch

from elastic_dp.device.gpu import gpus_are_in_use, is_gpu, open_gpu_generators, seed_gpus


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    # Not torch.manual_seed: it formats a stack trace for a device that is not in use yet (0.4 ms).
    torch.default_generator.manual_seed(seed % (1 << 63))
    if gpus_are_in_use():
        seed_gpus(seed % (1 << 63))


def open_generators(device: torch.device) -> None:
    """Before the first seed: `seed_everything` leaves out a device that is not in use yet, and what
    user code then draws there, such as a model's initial weights, would not depend on the seed."""
    open_gpu_generators(device)


@contextlib.contextmanager
def generators_kept(device: torch.device) -> Iterator[None]:
    """A context that restores the generators, also that of the device."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    devices = [device] if is_gpu(device) else []
    try:
        with torch.random.fork_rng(devices, device_type="cuda"):
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
