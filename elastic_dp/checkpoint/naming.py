"""What the tensors of a checkpoint are called in `model.state_dict()` and in the optimizer's.

The state holds each parameter and each buffer once, by its first name, buffers outside of the state_dict included.
A state_dict holds tied weights under each of their names. So a checkpoint carries the names of both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from elastic_dp.checkpoint.extra_state import unpacked


def naming_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """`parameters`: their names in the model's order. `model`: for each tensor of the state_dict, its name in the
    state. `groups`: the parameters of each group of the optimizer."""
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
    """What `model.load_state_dict` takes: tensors, and the extra state of modules, `plain` as in `decode`. The parameters
    of the state may be named or in the model's order."""
    step = tree["step"]
    tensors = {**step["buffers"], **_named(step["parameters"], naming)}
    keys = naming.get("model") or {name: name for name in tensors}
    extra = {
        name: unpacked(content, plain=plain)
        for name, content in tree["body"].get("extra_state", {}).items()
    }
    return {key: tensors[name] for key, name in keys.items()} | extra


def optimizer_state(tree: Mapping[str, Any], naming: Mapping[str, Any]) -> dict[str, Any]:
    """What `optimizer.load_state_dict` takes."""
    step = tree["step"]
    states = {i: dict(state) for i, state in enumerate(step["optimizer"]) if state}
    groups, first = [], 0
    for hyper, names in zip(tree["body"]["hyper"], naming["groups"], strict=True):
        groups.append({**hyper, "params": list(range(first, first + len(names)))})
        first += len(names)
    return {"state": states, "param_groups": groups}


def _named(parameters: Any, naming: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    if isinstance(parameters, Mapping):
        return dict(parameters)
    return dict(zip(naming["parameters"], parameters, strict=True))
