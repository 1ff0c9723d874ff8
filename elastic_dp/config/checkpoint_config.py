"""When a job makes checkpoints, and which it retains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from elastic_dp.config.field_checks import at_least, one_of, whole_number


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When to checkpoint and what to keep.

    The last step of a run that ends or is stopped is always kept. Where none of the first three is
    given, that is the only one, but for those that a run makes when it would otherwise lose steps:
    when a notice takes away so many workers that it cannot go on, on Ctrl-C, and when its workers
    are left without a controller. `every_steps`: after each step that it divides. `every_s`: so
    many seconds after the last one. `every="auto"`: as often as pays, by what a checkpoint costs
    and how often everyone was lost. Whichever comes first; None: not by that. `num_to_keep`: the
    newest, or the best where `checkpoint_score_attribute` names a logged metric
    (`checkpoint_score_order` "max" or "min"); None: all. A checkpoint is ranked by the value that
    the body of its own step logged; one without a value is never the best. The best and the newest
    are both kept, whatever `num_to_keep` is. `keep_every`: each step that it divides is kept for
    ever.
    """

    every_steps: int | None = None
    every_s: float | None = None
    every: Literal["auto"] | None = None
    num_to_keep: int | None = 3
    keep_every: int | None = None
    checkpoint_score_attribute: str | None = None
    checkpoint_score_order: Literal["max", "min"] = "max"

    def __post_init__(self) -> None:
        whole_number("CheckpointConfig.every_steps", self.every_steps, 1)
        at_least("CheckpointConfig.every_s", self.every_s, 1e-3)
        one_of("CheckpointConfig.every", self.every, (None, "auto"))
        whole_number("CheckpointConfig.num_to_keep", self.num_to_keep, 1)
        whole_number("CheckpointConfig.keep_every", self.keep_every, 1)
        one_of(
            "CheckpointConfig.checkpoint_score_order", self.checkpoint_score_order, ("max", "min")
        )

    @property
    def enabled(self) -> bool:
        """Whether any are made unasked."""
        return (self.every_steps, self.every_s, self.every) != (None, None, None)
