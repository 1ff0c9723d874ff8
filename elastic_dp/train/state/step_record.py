"""What a committed step came to. It goes into checkpoints, so its fields and its name stay as they
are."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class StepRecord:
    """The outcome of one committed step; equal on every worker."""

    __module__ = "elastic_dp.train.state"  # checkpoints name it so

    number: int
    epoch: int
    epoch_end: bool
    loss: float
    weight: float
    metrics: dict[str, float]
    lr: float
    grad_norm: float | None = None  # None: not computed yet
    kept: bool = False  # the members agreed on a checkpoint of it
    late: bool = False  # they agreed on none, since one of them still writes the last one
