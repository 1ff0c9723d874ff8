"""The options of an adapter that go on to `ElasticTrainer`."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from elastic_dp import ElasticTrainer, ScalingConfig
from elastic_dp.errors import SpecError
from elastic_dp.wording import did_you_mean

_OF_ELASTIC_TRAINER = set(inspect.signature(ElasticTrainer.__init__).parameters) - {"self"}
_OF_RESUMING = ("ckpt_path", "resume_from_checkpoint")


def scaling_of(
    adapter: str, options: Mapping[str, Any], precision: str | None, own: Iterable[str] = ()
) -> ScalingConfig:
    """Returns how the run may scale.

    Raises SpecError for an option that neither `ElasticTrainer` nor the adapter itself (`own`) has,
    for a sharded optimizer with a `precision` that it cannot have, and for workers of several
    processes.
    """
    known = {*_OF_ELASTIC_TRAINER, *own}
    for name in options:
        if name in _OF_RESUMING:
            raise SpecError(
                f"{name} is given, which is not supported: leave it out, since a run that is "
                "started again under the same name goes on from its newest checkpoint"
            )
        if name not in known:
            raise SpecError(f"{adapter} has no option {name!r}{did_you_mean(name, sorted(known))}")
    if options.get("sharding") is not None and precision == "fp16":
        raise SpecError(
            'the precision is fp16, whose loss scaling does not work with sharding="optimizer" '
            'yet: use bf16, or leave sharding="optimizer" out'
        )
    scaling = options.get("scaling")
    if not isinstance(scaling, ScalingConfig | None):
        raise SpecError(f"scaling is a {type(scaling).__name__}, must be a ScalingConfig")
    scaling = scaling or ScalingConfig()
    if scaling.processes_per_worker > 1:
        raise SpecError(
            f"ScalingConfig.processes_per_worker is {scaling.processes_per_worker}, which "
            f"{adapter} does not work with: it does not shard the model. Write a train function, "
            "which calls fully_shard and loops over ctx.steps"
        )
    return scaling
