"""What torch's NCCL process group may do by itself, which is nothing.

Torch's defaults are for jobs in which the loss of one rank ends all of them: a watchdog thread
aborts the process when an operation fails, also one of a group that was left long ago, and errors
and timeouts are announced to all ranks through the store. Here the others go on, and failures are
found by heartbeats and by the training thread. Names and defaults are those of
`ProcessGroupNCCL.hpp` and `FlightRecorder.hpp` in torch 2.11 to 2.15. Torch reads them when a group
is made; only `TORCH_DISTRIBUTED_DEBUG` is read when `torch.distributed` is imported.
"""

from __future__ import annotations

from collections.abc import MutableMapping

import torch.distributed as dist

# A worker overrides a value that the user has set, and says so: with it, survivors would be ended,
# or could not be freed.
REQUIRED = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    "TORCH_NCCL_DESYNC_DEBUG": "0",  # turns error handling on again
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",  # the training thread reports them; a watchdog cannot
    "TORCH_NCCL_TEARDOWN_ON_TIMEOUT": "0",  # from torch 2.15 on: whatever the line above says
}
# A user's own value stays: the flight recorder costs memory and time, and ends nobody.
DEFAULTS = {
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
    "TORCH_FR_BUFFER_SIZE": "0",
}
_DEBUG = "TORCH_DISTRIBUTED_DEBUG"


def set_nccl_environment(environment: MutableMapping[str, str]) -> list[str]:
    """Set the variables for this process. Returns what the user must be told: one text for each
    value of theirs that is overridden."""
    said = []
    for name, value in REQUIRED.items():
        given = environment.get(name)
        if given not in (None, value):
            said.append(_overridden(name, str(given), value))
        environment[name] = value
    if environment.get(_DEBUG, "").upper() == "DETAIL":  # means the three above that debug
        said.append(_overridden(_DEBUG, environment[_DEBUG], "INFO"))
        environment[_DEBUG] = "INFO"
    if dist.get_debug_level() == dist.DebugLevel.DETAIL:
        dist.set_debug_level(dist.DebugLevel.INFO)
    set_default_environment(environment)
    return said


def set_default_environment(environment: MutableMapping[str, str]) -> None:
    """Set defaults in a process that forms no group itself; keep what the user has set."""
    for name, value in (REQUIRED | DEFAULTS).items():
        environment.setdefault(name, value)


def _overridden(name: str, given: str, value: str) -> str:
    return (
        f"{name}={given} is overridden with {value}: with it, torch ends or blocks the workers "
        "that survive the loss of another one"
    )
