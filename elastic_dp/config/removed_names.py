"""Names that earlier versions had, and what to write instead."""

import functools
from typing import Any, TypeVar

from elastic_dp.errors import SpecError

C = TypeVar("C", bound=type)
_WIRE = 'use wire="bf16" or wire="int8", whose runs are exact'
REMOVED_NAMES = {
    "warm_processes": (
        "ScalingConfig.warm_processes does not exist any more: standby=1 keeps a worker ready that "
        "replaces a lost one at once"
    ),
    "comm_hook": f"comm_hook= does not exist any more: {_WIRE}",
    "PowerSGDConfig": f"PowerSGDConfig does not exist any more, nor does comm_hook=: {_WIRE}",
}


def refuses_removed_names(config: C) -> C:
    """Let a class of settings refuse what it had once by a SpecError, and not by a TypeError."""
    init: Any = config.__init__  # type: ignore[misc]

    @functools.wraps(init)
    def check(self: Any, *args: Any, **fields: Any) -> None:
        for name in fields:
            if name in REMOVED_NAMES:
                raise SpecError(REMOVED_NAMES[name])
        init(self, *args, **fields)

    config.__init__ = check  # type: ignore[misc]
    return config
