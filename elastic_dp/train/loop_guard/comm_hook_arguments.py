"""What `comm_hook=` of a job means for a loop, which is checked before training."""

from __future__ import annotations

import dataclasses
from typing import Any

from elastic_dp.config import CommHookConfig, PowerSGDConfig
from elastic_dp.distributed.comm_hook import HookSettings
from elastic_dp.errors import SpecError


def hook_settings(comm_hook: CommHookConfig | None, given: Any) -> HookSettings | None:
    """Returns the settings of the job's `comm_hook`. Raises SpecError for `StepsArguments` that it
    does not work with."""
    if comm_hook is None:
        return None
    if given.precision == "fp16":
        raise SpecError(
            f'comm_hook is {comm_hook!r} and precision is "fp16", whose gradients may overflow, '
            'and in PowerSGD stay so in later steps: use precision="bf16"'
        )
    if given.noise_scale_every is not None:
        raise SpecError(
            "noise_scale_every compares the gradients of virtual workers with their sum, which "
            f"comm_hook={comm_hook!r} compresses: leave out one of the two"
        )
    config = PowerSGDConfig() if comm_hook == "powersgd" else comm_hook
    if isinstance(config, PowerSGDConfig):
        return HookSettings("powersgd", dataclasses.asdict(config))
    return HookSettings(config)
