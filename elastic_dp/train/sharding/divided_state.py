"""What the user's optimizer has in the place of its state, of which each worker holds a part."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from elastic_dp.errors import LoopError


class DividedState(defaultdict[Any, Any]):
    """An empty `optimizer.state`. Code that looks for state there, to change or to keep it, would
    find none and go on, so that is a LoopError.

    This package itself uses `get`, `pop`, `update` and the methods of `dict`.
    """

    def __init__(self) -> None:
        super().__init__(dict)

    def _refuse(self, *_: Any) -> NoReturn:
        raise _not_here("optimizer.state was read")

    __iter__: Callable[..., Any] = _refuse
    __missing__ = keys = values = items = clear = _refuse


def refuse_state_dict(_: torch.optim.Optimizer) -> NoReturn:
    """Refuses `optimizer.state_dict()`, as its pre-hook."""
    raise _not_here("optimizer.state_dict() was called")


def _not_here(what: str) -> LoopError:
    return LoopError(
        f'{what}, which has no state: with sharding="optimizer" each worker holds a part of it. '
        "Checkpoints have all of it (ctx.checkpoint(), Result.load_state, "
        "elastic-dp checkpoints export), or leave sharding out"
    )
