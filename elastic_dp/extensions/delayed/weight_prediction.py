"""An optimizer that leaves in the parameters a prediction of the weights, for late gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from elastic_dp.errors import SpecError
from elastic_dp.train.master_weights import MasterWeights, master_dtype


class WeightPrediction(MasterWeights):
    """Keeps the weights in its state, and leaves in the parameters what they will be some updates
    later, for `staleness=1` (weight prediction, Chen et al. 2018, arXiv:1809.02839).

    `WeightPrediction(model.parameters(), torch.optim.NAdam, lr=1e-3, ahead={0: 0, 1000: 1})`

    - `params` and `options`: those of `optimizer_class`, whose groups and defaults this has.
    - `optimizer_class`: a class of `torch.optim`, which updates the weights.
    - `ahead`: how many updates to predict: a number, or a dict by the number of updates made
      before, as `staleness` has it by the step. A parameter is its weight plus `ahead` times the
      last change of the weight, so a late gradient approximates that of the weights to which it is
      applied. Use 1 for an optimizer that looks one update ahead itself, such as NAdam, and 2 for
      Adam.

    The weights of a parameter are its state "master"; those of parameters in bfloat16 and float16
    are in fp32, as in `MasterWeights`. The forward pass, `ctx.evaluate` and exported weights have
    the prediction. Raises SpecError for other classes or values.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: type[torch.optim.Optimizer],
        *,
        ahead: float | Mapping[int, float] = 1.0,
        **options: Any,
    ) -> None:
        super().__init__(params, optimizer_class, **options)
        self.ahead = dict(ahead) if isinstance(ahead, Mapping) else {0: ahead}
        if not all(map(_is_number, self.ahead.values())):
            raise SpecError(f"ahead is {ahead!r}, must be numbers of updates from 0")
        if 0 not in self.ahead or not all(isinstance(n, int) and n >= 0 for n in self.ahead):
            raise SpecError(
                f"ahead is {ahead!r}, must have the number of updates for 0 and later ones: "
                "{0: 0, 1000: 1}"
            )
        self.param_groups[0]["updates"] = 0  # state of the run, as a rate is

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles. Torch's own method leaves out attributes of subclasses."""
        return super().__getstate__() | {"ahead": self.ahead}

    # ----------------------------------------------------------------------------------- private

    def _has_master(self, p: torch.Tensor) -> bool:
        return True  # the parameter itself is a prediction

    def _updated(self) -> None:
        self.param_groups[0]["updates"] += 1

    def _update(self, group: dict[str, Any], parameters: Sequence[torch.Tensor]) -> None:
        updates = self.param_groups[0]["updates"]
        ahead = self.ahead[max(begin for begin in self.ahead if begin <= updates)]
        predicted = parameters if ahead else ()
        before = [self.state[p].get("master", p).to(master_dtype(p), copy=True) for p in predicted]
        super()._update(group, parameters)
        for p, old in zip(predicted, before, strict=True):
            master = self.state[p]["master"]
            p.copy_(torch.add(master, old.neg_().add_(master), alpha=ahead))


def _is_number(ahead: Any) -> bool:
    is_number = isinstance(ahead, int | float) and not isinstance(ahead, bool)
    return is_number and 0 <= ahead < math.inf
