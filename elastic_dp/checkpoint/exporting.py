"""Exports checkpoints to formats that open without this package, and loads state for a warm start.

    .safetensors   the model's state_dict
    .pt            {"model", "optimizer", "scheduler", "user", "step", "metrics"} by torch.save;
                   opens with weights_only
    a folder       the same as a torch.distributed.checkpoint

Types of the user's code become plain values.

The state holds each parameter and each buffer once, by its first name, and includes buffers that
are not in the state_dict. A state_dict holds tied weights under each of their names. So a
checkpoint stores both sets of names.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from elastic_dp.checkpoint.catalog import Catalog, Keep
from elastic_dp.checkpoint.checkpoint_reader import load, load_newest, taking_apart
from elastic_dp.checkpoint.codec import from_bytes
from elastic_dp.checkpoint.commit_record import CommitRecord
from elastic_dp.checkpoint.layout import WORDS, Blob, TensorSpec, Unit, dtype_name, flat_bytes
from elastic_dp.errors import CheckpointDamaged, CheckpointError
from elastic_dp.storage import StorageURL, Store


@dataclass(frozen=True)
class LoadedState:
    """The content of a checkpoint.

    `model`, `optimizer` and `scheduler` are for the `load_state_dict` of each. `user` holds the
    state_dict of each object that was passed as `state=`. `damaged` says which newer checkpoints
    were skipped, and why.
    """

    step: int
    model: dict[str, Any]
    optimizer: dict[str, Any] | None = None
    scheduler: Any = None
    user: dict[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    damaged: tuple[str, ...] = ()

    @property
    def state(self) -> dict[str, Any]:
        """`user`, by the name of the argument of `ctx.steps`."""
        return self.user


def load_state(
    url: str,
    step: int | Literal["latest", "best"] = "latest",
    *,
    metric: str | None = None,
    order: Literal["max", "min"] = "max",
    storage_options: Mapping[str, Any] | None = None,
) -> LoadedState:
    """Loads the state of a run from its folder (`storage_path/name`), for example to start another
    run.

    Tensors are on the host. With `step="best"`, the checkpoint with the best `metric` is loaded, by
    `order` "max" or "min". With `step="latest"`, a damaged checkpoint is skipped for the one before
    it. Raises CheckpointError, CheckpointDamaged, StorageError.
    """
    catalog = Catalog(Store(url, storage_options))
    damaged: list[CheckpointDamaged] = []
    keep = Keep(score_attribute=metric, order=order)
    commit, tree = load_newest(catalog, step, keep, on_damage=damaged.append)
    return _loaded(commit, tree, tuple(map(str, damaged)))


def export(catalog: Catalog, commit: CommitRecord, destination: str) -> None:
    """Writes a checkpoint to a file, or to a folder if `destination` has no suffix.

    A `StorageURL` brings the options of its store. Raises CheckpointError for an unknown suffix.
    """
    state = _loaded(commit, load(catalog, commit, plain=True), plain=True)
    if destination.endswith(".safetensors"):
        _write(destination, safetensors(state.model))
    elif destination.endswith((".pt", ".pth", ".bin")):
        file = io.BytesIO()
        torch.save(_as_dict(state), file)
        _write(destination, file.getbuffer())
    elif not destination or "." in destination.rstrip("/").rpartition("/")[2]:
        raise CheckpointError(f"{destination!r} must end in .safetensors or .pt, or be a folder")
    elif isinstance(destination, StorageURL) and destination.options:
        raise CheckpointError(
            f"{destination}: torch.distributed.checkpoint opens its folder itself, without storage "
            "options; export to a local folder, or put the options where the store's own tools look"
        )
    else:
        _export_distributed(state, destination)


def safetensors(tensors: Mapping[str, Any]) -> bytes:
    """Returns the content of a safetensors file. Tied weights are written once for each of their
    names.

    Raises CheckpointError for a dtype that safetensors lacks, and for a value that is not a tensor.
    """
    for name, value in tensors.items():
        if not isinstance(value, torch.Tensor):
            raise CheckpointError(
                f"safetensors holds tensors only, and {name} is a {type(value).__name__}; "
                "export to a .pt file"
            )
        if dtype_name(value.dtype) not in WORDS:
            raise CheckpointError(
                f"safetensors has no {value.dtype} ({name}); export to a .pt file"
            )
    found = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    found = [(name, tensor.contiguous()) for name, tensor in found]
    specs = {name: TensorSpec.of(name, tensor) for name, tensor in found}
    blob = Blob.of([Unit(name, 0, spec.nbytes) for name, spec in specs.items()], specs)
    return b"".join([blob.header, *(flat_bytes(one).numpy().tobytes() for _, one in found)])


def _export_distributed(state: LoadedState, folder: str) -> None:
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        # That there is one process, and that the folder's checkpoint is replaced
        warnings.filterwarnings("ignore", "torch.distributed is|Detected an existing checkpoint")
        dcp.save(_as_dict(state), checkpoint_id=folder, no_dist=True)


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


def _loaded(
    commit: CommitRecord, tree: Any, damaged: tuple[str, ...] = (), *, plain: bool = False
) -> LoadedState:
    naming, metrics = commit.metadata.naming, commit.metadata.metrics
    others = "Something else than elastic_dp has written to its folder: take another checkpoint"
    with taking_apart(commit.step, others):
        return LoadedState(
            step=commit.step,
            model=model_state(tree, naming, plain=plain),
            optimizer=optimizer_state(tree, naming),
            scheduler=scheduler_state(tree),
            user=tree["body"]["user"],
            metrics=metrics,
            damaged=damaged,
        )


def _as_dict(state: LoadedState) -> dict[str, Any]:
    stored = {name: value for name, value in vars(state).items() if name != "damaged"}
    return stored | {"metrics": dict(state.metrics)}


def _write(destination: str, content: Any) -> None:
    store = Store(destination)
    store.write(store.path, content)
