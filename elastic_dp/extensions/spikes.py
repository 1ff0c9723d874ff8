"""Rewinds the run when the loss jumps: see `Rewind`, the value of `FailureConfig.on_spike`.

The rule depends on the losses alone, and they are the same bits on all members. The losses that it
compares with are part of the training state, so joiners and later starts decide alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from elastic_dp.config.failure_config import Rewind
from elastic_dp.errors import RewindRequested
from elastic_dp.train.state.train_state import OWN
from elastic_dp.train.step.loss_result import mean
from elastic_dp.train.step.participants import StepParticipant, Verdict
from elastic_dp.train.step_builder import StepBuilder


def extend(build: StepBuilder) -> None:
    """Looks at the loss of each step."""
    found = build.spec.failure.on_spike
    assert found is not None
    rule = SpikeRule(found, found.at_most - len(build.spec.left_out), build)
    build.given = replace(build.given, state={**build.given.state, f"{OWN}losses": rule})
    build.new_participants.append(lambda: rule)


class SpikeRule(StepParticipant):
    """Ends the step where the loss jumps, on all members. A part of the training state, too."""

    name = "spikes"

    def __init__(self, rule: Rewind, left: int, build: StepBuilder) -> None:
        """`left`: how often the run may still be rewound. `build`: has the results of a step, once
        its parts are made."""
        self._rule, self._left, self._build = rule, left, build
        self._recent: list[float] = []  # losses of the last steps, oldest first
        self._loss = 0.0

    def state_dict(self) -> dict[str, Any]:
        return {"values": [*self._recent]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._recent = [*state["values"]]

    def begin(self, step: int) -> None:
        self._step = step

    def agree(self, proposals: Sequence[bytes]) -> Verdict:
        """Raises RewindRequested, unless the loss is not finite: that fails the run later."""
        of_all = self._build.results.of_all.values()
        self._loss = mean([(one.loss, one.weight) for one in of_all])
        why = self._why()
        if why and self._left > 0:
            rule, step = self._rule, self._step
            to_step = max(0, step - rule.before - 1)
            raise RewindRequested(step, why, to_step, to_step + 1, step + rule.after)
        return None

    def _why(self) -> str:
        """Returns what is wrong with the loss, or an empty text."""
        loss, recent, rule = self._loss, self._recent, self._rule
        if not math.isfinite(loss):  # with a loss scale, the step is left out
            return f"the loss is {loss}" if self._build.loss_scale is None else ""
        if len(recent) < rule.window:
            return ""
        usual = median(recent)  # where it is 0, no size is known that a loss may have
        if not usual or loss <= usual + (rule.factor - 1) * abs(usual):
            return ""
        words = f"more than {rule.factor:g} times" if usual > 0 else "far above"
        before = f"{usual:.6g}, the median of the {rule.window} before it"
        return f"the loss is {loss:.6g}, {words} {before}"

    def commit(self) -> None:
        if math.isfinite(self._loss):
            self._recent = [*self._recent, self._loss][-self._rule.window :]
