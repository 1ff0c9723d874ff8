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

from elastic_dp.checkpoint.codec import from_bytes


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

    `plain`: see `decode`.
    """
    step = tree["step"]
    parameters = dict(zip(naming["parameters"], step["parameters"], strict=True))
    tensors = {**step["buffers"], **parameters}
    extra = {
        name: from_bytes(content, plain=plain)["value"]
        for name, content in tree["body"]["extra_state"].items()
    }
    return {key: tensors[name] for key, name in naming["model"].items()} | extra


def optimizer_state(tree: Mapping[str, Any], naming: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what `optimizer.load_state_dict` takes."""
    states = {i: state for i, state in enumerate(tree["step"]["optimizer"]) if state}
    held, groups, first = tree["body"]["held"]["optimizers"][0]["groups"], [], 0
    for values, group in zip(held, naming["groups"], strict=True):
        numbers = list(range(first, first + len(group)))
        groups.append({**values["values"], "params": numbers})
        first += len(group)
    return {"state": states, "param_groups": groups}


def scheduler_state(tree: Mapping[str, Any]) -> Any:
    """Returns what `scheduler.load_state_dict` takes."""
    held = tree["step"]["held"]["scheduler"]
    return None if held is None else held["values"] | held["objects"]
