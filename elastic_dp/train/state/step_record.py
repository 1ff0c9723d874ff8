"""The outcome of a committed step. Checkpoints store its fields."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class StepRecord:
    """The outcome of one committed step; equal on every worker."""

    number: int
    epoch: int
    epoch_end: bool
    loss: float
    weight: float
    metrics: dict[str, float]  # of the loss function and of participants
    lr: float
    grad_norm: float | None = None  # None: not computed yet
    kept: bool = False  # the members agreed on a checkpoint of it
    late: bool = False  # the members skip checkpoints: an upload of one of them is late
