"""What `ctx.steps` takes where a worker has several processes."""

from __future__ import annotations

from typing import Any

from elastic_dp.distributed.local_shards import is_sharded
from elastic_dp.errors import ModelError, SpecError
from elastic_dp.train.gang.gang import Gang


def check_gang(gang: Gang | None, given: Any) -> None:
    """Checks the `StepsArguments`. Raises ModelError and SpecError."""
    for name, p in given.model.named_parameters():
        if gang is None and is_sharded(p):
            raise ModelError(
                f"model.{name} is a DTensor, of which other processes hold a part: set "
                "ScalingConfig.processes_per_worker, and shard the model over ctx.mesh"
            )
        if gang is not None and not (is_sharded(p) and p.device_mesh == gang.mesh):
            raise ModelError(
                f"model.{name} is not sharded over ctx.mesh: call fully_shard(model, "
                "mesh=ctx.mesh) for the whole model, before the optimizer is made"
            )
    if gang is None:
        return
    from torch.distributed.fsdp import FSDPModule  # takes a second, and few jobs need it

    if not isinstance(given.model, FSDPModule):
        raise ModelError(
            "the model is not one that fully_shard has returned. Each process of a worker has rows "
            "of its own, so the gradients must be averaged among them, as fully_shard does; tensor "
            "parallelism, in which all have the same rows, does not work yet"
        )
    if given.precision == "fp16":
        raise SpecError(
            'precision="fp16" scales the loss, which does not work with processes_per_worker; '
            'use "bf16"'
        )
    if given.noise_scale_every is not None:
        raise SpecError(
            "noise_scale_every needs the whole gradient, of which each process has a part with "
            "processes_per_worker: leave out one of the two"
        )
