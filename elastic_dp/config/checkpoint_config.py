"""When a job makes checkpoints, and which of them it keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from elastic_dp.config.field_checks import check_fields
from elastic_dp.config.removed_names import refuses_removed_names


@refuses_removed_names
@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When to make checkpoints, and which to keep.

    The last step of a run that ends or is stopped is always kept. Without `every_steps` and
    `every_s` that is the only checkpoint, except those that save a run from losing steps: when a
    drain notice takes so many workers that the run cannot continue, on Ctrl-C, and when the workers
    have lost their controller. If several are set, whichever is due first counts.

    - `every_steps`: make a checkpoint after every step that is a multiple of this.
    - `every_s`: make a checkpoint this many seconds after the last one. "auto" chooses the interval
      from the cost of a checkpoint, for a loss of all workers every six hours.
    - `num_to_keep`: how many of the newest are kept, or of the best if `checkpoint_score_attribute`
      is set; None keeps all. The best and the newest are always kept.
    - `keep_every`: keep every step that is a multiple of this for ever.
    - `checkpoint_score_attribute`: the logged metric that ranks checkpoints. The value is the one
      that the loop body of the checkpoint's own step has logged; a checkpoint without a value is
      never the best.
    - `checkpoint_score_order`: whether "max" or "min" is the best.
    """

    every_steps: int | None = None
    every_s: float | Literal["auto"] | None = None
    num_to_keep: int | None = 3
    keep_every: int | None = None
    checkpoint_score_attribute: str | None = None
    checkpoint_score_order: Literal["max", "min"] = "max"

    def __post_init__(self) -> None:
        check_fields(self, every_steps=1, every_s=1e-3, num_to_keep=1, keep_every=1)

    @property
    def enabled(self) -> bool:
        """Whether checkpoints are made on a schedule."""
        return (self.every_steps, self.every_s) != (None, None)
