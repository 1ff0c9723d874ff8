"""Converts the state of a checkpoint to the state_dicts of the model, the optimizer and the
scheduler.

The state holds each parameter and each buffer once, by its first name, and includes buffers that
are not in the state_dict. A state_dict holds tied weights under each of their names. A checkpoint
therefore stores both sets of names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from elastic_dp.checkpoint.extra_state import unpacked
from elastic_dp.checkpoint.python_objects import MISSING, Plain
from elastic_dp.checkpoint.tensor_aliases import join_aliases


def naming_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Returns the names that `model_state` and `optimizer_state` need.

    `parameters` holds the parameters' names in the model's order; `model` maps the keys of the
    state_dict to names in the state; `groups` holds the parameters' names by group of the
    optimizer.
    """
    known = {id(tensor): name for name, tensor in model.named_buffers()}
    known |= {id(tensor): name for name, tensor in model.named_parameters()}
    stored = model.state_dict(keep_vars=True)
    keys = {key: known[id(value)] for key, value in stored.items() if id(value) in known}
    groups = [[known[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    parameters = [name for name, _ in model.named_parameters()]
    return {"parameters": parameters, "model": keys, "groups": groups}


def model_state(
    tree: Mapping[str, Any], naming: Mapping[str, Any], *, plain: bool = False
) -> dict[str, Any]:
    """Returns what `model.load_state_dict` takes: tensors, and the extra state of modules.

    `plain`: see `decode`. The state may hold the parameters by name or in the model's order.
    """
    step = tree["step"]
    tensors = {**step["buffers"], **_named(step["parameters"], naming)}
    keys = naming.get("model") or {name: name for name in tensors}
    extra = {
        name: unpacked(content, plain=plain)
        for name, content in tree["body"].get("extra_state", {}).items()
    }
    return {key: tensors[name] for key, name in keys.items()} | extra


def optimizer_state(tree: Mapping[str, Any], naming: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what `optimizer.load_state_dict` takes."""
    step, hyper = tree["step"], tree["body"]["hyper"]
    parameters = _named(step["parameters"], naming)
    owners = {f"parameter {name}": p for name, p in parameters.items()}
    owners |= {f"buffer {name}": buffer for name, buffer in step["buffers"].items()}
    owners |= {
        f"optimizer.param_groups[{i}][{key!r}]": item
        for i, group in enumerate(hyper)
        for key, item in group.items()
        if isinstance(item, torch.Tensor)
    }
    joined, _ = join_aliases(step["optimizer"], step.get("shared", []), owners)
    names = [name for group in naming["groups"] for name in group]
    plain = Plain()
    states = {
        i: plain.named(state, f"optimizer.state[{name}]")
        for i, (name, state) in enumerate(zip(names, joined, strict=True))
        if state
    }
    plain, groups, first = Plain(), [], 0
    for i, (values, group) in enumerate(zip(hyper, naming["groups"], strict=True)):
        inner = plain.named(values, f"optimizer.param_groups[{i}]")
        groups.append({**inner, "params": list(range(first, first + len(group)))})
        first += len(group)
    return {"state": states, "param_groups": groups}


def scheduler_state(tree: Mapping[str, Any]) -> Any:
    """Returns what `scheduler.load_state_dict` takes."""
    return Plain().value(tree["step"]["scheduler"], MISSING, "scheduler.state_dict()")


def _named(parameters: Any, naming: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    if isinstance(parameters, Mapping):
        return dict(parameters)
    return dict(zip(naming["parameters"], parameters, strict=True))
