"""What is known of the optimizers of `torch.optim`. Each updates a parameter from that parameter's
gradient and state alone, and its `step` does nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

# They compute each element from that element's gradient and state.
ELEMENTWISE = frozenset(
    {
        torch.optim.ASGD,
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
    }
)
# The others look at the whole parameter.
BY_PARAMETER = ELEMENTWISE | {torch.optim.Adafactor, torch.optim.Muon}


def may_write_to_gradients(
    kind: type[torch.optim.Optimizer], groups: Iterable[Mapping[str, Any]]
) -> bool:
    """Returns whether `step` of an optimizer of this class may write to the gradients it is given.
    Of those of `torch.optim` only SGD with Nesterov momentum does, where it updates many tensors
    together, as it does on devices unless it is told otherwise."""
    if not kind.__module__.startswith("torch.optim"):
        return True
    return kind is torch.optim.SGD and any(
        group.get("nesterov")
        and (group.get("foreach") or any(p.device.type != "cpu" for p in group["params"]))
        for group in groups
    )
