"""On which kind of device the tensors of a checkpoint belong in the worker that restores it."""

from __future__ import annotations

from typing import Any

from elastic_dp.checkpoint.checkpoint_reader import device_types
from elastic_dp.checkpoint.commit_record import CommitRecord
from elastic_dp.distributed.local_shards import local_of
from elastic_dp.train.state.train_state import TrainState

_COUNT = "step"


def places_here(commit: CommitRecord, state: TrainState) -> dict[str, str]:
    """Returns the type of the device on which each tensor belongs here, by the tensor's name.

    That is the type of the device that it was on, unless its parameter was on another type of
    device than here: then it goes where the parameter is. As in torch's `load_state_dict`, counts
    of steps stay on the host, unless the optimizer is fused or capturable.
    """
    found, moved = device_types(commit), dict[Any, str]()
    for n, p in enumerate(state.parameters.values()):
        kind = local_of(p).device.type
        if found.get(f"step.parameters.{n}", kind) != kind:
            moved[p] = found[f"step.previous.parameters.{n}"] = kind
    groups = [(p, group) for group in state.optimizer.param_groups for p in group["params"]]
    for name in found:
        if not name.startswith("step.optimizer."):
            continue
        _, _, number, key = name.split(".", 3)
        p, group = groups[int(number)]
        if p in moved:
            counts = key == _COUNT and not (group.get("fused") or group.get("capturable"))
            found[name] = "cpu" if counts else moved[p]
    return found
