"""Python's, NumPy's and torch's global generators, which user code may draw from."""

from __future__ import annotations

import random

import numpy as np
import torch


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    # Not torch.manual_seed: where a device is not in use yet, it formats a stack trace for it (0.4
    # ms).
    torch.default_generator.manual_seed(seed % (1 << 63))
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed % (1 << 63))


def open_generators(device: torch.device) -> None:
    """Before the first seed: `seed_everything` leaves out a device that is not in use yet, and what
    user code then draws there, such as a model's initial weights, would not depend on the seed."""
    if device.type == "cuda":
        torch.cuda.init()
