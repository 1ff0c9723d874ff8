"""A worker's training state, and the two ways in which another worker takes it over.

*What a step changes* (parameters, buffers, optimizer, loss scale, the step's record,
hyper-parameters and scheduler as of the commit) is what a member that is behind takes from one that
is ahead. *What the loop body changes* (the user's `state=`, hyper-parameters and scheduler as they
are now) belongs to each member, since each runs every body once; only a worker that joins takes
both. A transfer is all or nothing: `adopt` is called with the whole tree or not at all, and only a
worker without state receives directly into its own tensors.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from elastic_dp.checkpoint.codec import from_bytes, to_bytes
from elastic_dp.checkpoint.layout import TensorSpec
from elastic_dp.distributed.local_shards import is_sharded, local_of, part_of, whole_of
from elastic_dp.errors import ModelError, StateError
from elastic_dp.train.loop_guard.model_guard import ModelGuard
from elastic_dp.train.master_weights import state_kind
from elastic_dp.train.state.optimizer_state import OptimizerState, part_of_state
from elastic_dp.train.state.state_payload import tensor_slot
from elastic_dp.train.step.precision import LossScale

if TYPE_CHECKING:
    from elastic_dp.checkpoint.commit_record import Manifest
    from elastic_dp.checkpoint.snapshot import HeldState
    from elastic_dp.distributed.process_group import ProcessGroup
    from elastic_dp.train.checkpointing.collective_read import Ranges, ReadCheckpoint

_EXTRA = "_extra_state"  # the name that torch uses in a state_dict
OWN = "elastic_dp."  # begins the keys of `state=` that an extension adds
_LARGE_BYTES = 1 << 18  # below this a tensor's memory is not preallocated


@dataclass
class StepRecord:
    """The outcome of one committed step; equal on every worker. Checkpoints store its fields."""

    number: int
    epoch: int
    epoch_end: bool
    loss: float
    weight: float
    metrics: dict[str, float]  # of the loss function and of participants
    lr: float
    grad_norm: float | None = None  # None: not computed yet
    kept: bool = False  # the members agreed on a checkpoint of it
    late: bool = False  # the members skip checkpoints: an upload of one of them is late


class StatePart(Protocol):
    """A part of the state that an extension adds: what the last step was computed with."""

    def tree(self) -> dict[str, Any]: ...

    def adopt(self, tree: Mapping[str, Any]) -> None:
        """Takes over a complete `tree`, whose tensors are the caller's no longer."""


class OptimizerHolders:
    """Who holds the optimizer's state: each member all of it, in the user's optimizer. An extension
    divides it among the members."""

    is_divided = False

    @property
    def has_all(self) -> bool:
        """Whether this member holds everything."""
        return True

    def lacks_copies(self, generation: int) -> bool:
        """Whether some part may have one holder since `generation`, which this member has left."""
        return False

    def open(
        self,
        group: ProcessGroup,
        generation: int,
        topology: Sequence[Sequence[int]],
        *,
        at_once: bool = False,
    ) -> int:
        """Gives each member what it is to hold in this generation. Returns the number of bytes
        received. `at_once`: before the first step. Raises PiecesLost and GroupError."""
        return 0

    def close(self) -> None:
        """Leaves the generation."""

    # ------------------------------------------------------------------------ state transfers

    def tree(self) -> dict[str, Any]:
        """Returns what another member must know of the last step to take it over."""
        return {}

    def take_over(self, step: Mapping[str, Any], *, joins: bool) -> None:
        """Goes to the step of this tree, before parameters and groups do."""

    def adopted(self, step: Mapping[str, Any], *, joins: bool) -> None:
        """Parameters and groups are those of this tree now."""

    # ---------------------------------------------------------------------------- checkpoints

    def to_write(self, worker: str, members: Sequence[str]) -> HeldState | None:
        """Returns the parts that `worker` holds. `members` are those of the generation in which it
        got them, by rank. None: all members hold everything."""
        return None

    def needs(
        self, manifest: Manifest, world_size: int, topology: Sequence[Sequence[int]]
    ) -> list[Ranges] | None:
        """Returns what each rank of a generation needs of a checkpoint. None: everything."""
        return None

    def common(self, manifest: Manifest) -> Manifest:
        """Returns the description of what each member needs of a checkpoint."""
        return manifest

    def restore(
        self,
        read: ReadCheckpoint,
        places: Mapping[str, str],
        rank: int,
        world_size: int,
        topology: Sequence[Sequence[int]],
    ) -> None:
        """Holds what it is to hold of a checkpoint, whose other state is restored already.
        `places`: the type of the device on which each tensor belongs, by its name."""


@dataclass
class TrainState:
    """The user's own objects, which stay the same objects through every generation."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Any
    loss_scale: LossScale | None
    user: Mapping[str, Any]
    record: StepRecord | None = None
    bad_row_groups: set[int] = field(default_factory=set)  # skipped by all members
    kinds: list[str] = field(default_factory=list)  # of machines that computed steps of it
    inexact_because: list[str] = field(default_factory=list)  # operations of its steps
    holders: OptimizerHolders = field(default_factory=OptimizerHolders)
    previous: StatePart | None = None  # None: gradients are applied in the step that has them
    _preallocated: list[list[torch.Tensor]] = field(default_factory=list)  # of `preallocate`
    _takes_parts: bool = False  # whether the optimizer's state arrives in its own tensors

    def __post_init__(self) -> None:
        self.parameters = dict(self.model.named_parameters())
        # Whether the state is sharded over the processes of this worker.
        self.in_parts = any(map(is_sharded, self.parameters.values()))
        self.extra = extra_states(self.model)
        self.optimizers = OptimizerState(
            self.optimizer, self.scheduler, self.model, self.user.values()
        )
        self.model_guard = ModelGuard(self.model, self.optimizer)
        self.note_commit()

    def layout(self) -> dict[str, str]:
        """Returns what must be equal on all members and in a checkpoint; see `layout_of`."""
        names = {p: name for name, p in self.parameters.items()}
        return layout_of(
            self.parameters,
            dict(self.model.named_buffers()),
            [extra.name for extra in self.extra],
            type(self.optimizer).__name__,
            [[names[p] for p in group["params"]] for group in self.optimizer.param_groups],
            self.user,
        )

    def commit(self, record: StepRecord) -> None:
        """Records the outcome of a step that was applied."""
        self.record = record
        self.note_commit()

    def note_commit(self) -> None:
        """Records what the body may change, for members that have not run the body yet."""
        torch.clear_autocast_cache()  # the body may run under autocast
        self.optimizers.note_commit()

    # ----------------------------------------------------------------- transfer

    def tree(
        self, evaluations: Sequence[dict[str, float]], ended: str | None, *, whole: bool = False
    ) -> dict[str, Any]:
        """Returns the state as the source sends it. What is sharded over the workers is not in it.
        Of what is sharded over the processes of this worker it has the local parts, or with
        `whole`, for a checkpoint, all of it, for which the other processes call `gather`."""
        optimizers = self.optimizers
        of_parameters = None
        parameters = [whole_of(p) if whole else local_of(p) for p in self.parameters.values()]
        if whole and self.in_parts:
            of_parameters = optimizers.gathered()
        apart = {} if whole else self.holders.tree()
        if self.previous is not None:
            apart["previous"] = self.previous.tree()
        extra = {one.name: one.read() for one in self.extra}
        return {
            "step": {
                **apart,
                "parameters": parameters,
                "buffers": dict(self.model.named_buffers()),
                **optimizers.state(of_parameters),
                "held": optimizers.committed,
                "extra_state": extra,
                "loss_scale": None if self.loss_scale is None else vars(self.loss_scale),
                "record": None if self.record is None else vars(self.record),
                "bad_row_groups": sorted(self.bad_row_groups),
                "kinds": list(self.kinds),
                "inexact_because": list(self.inexact_because),
            },
            "body": {
                "held": optimizers.now(),
                "extra_state": extra,
                "user": {key: value.state_dict() for key, value in self.user.items()},
                "requires_grad": [p.requires_grad for p in self.parameters.values()],
                "training": [m.training for m in self.model.modules()],
            },
            "evaluations": list(evaluations),
            "ended": ended,
        }

    def gather(self) -> None:
        """Takes part in what another process of this worker gathers for `tree`."""
        for p in self.parameters.values():
            whole_of(p)
        self.optimizers.gather()

    def part(self, tree: Any, process: int) -> Any:
        """Returns what a process of this worker takes over of a whole tree."""
        step, groups = tree["step"], self.optimizer.param_groups
        optimized = [p for group in groups for p in group["params"]]
        parameters = zip(step["parameters"], self.parameters.values(), strict=True)
        entries = zip(step["optimizer"], optimized, strict=True)
        parts = {
            "parameters": [part_of(whole, p, process) for whole, p in parameters],
            "optimizer": [
                {key: part_of_state(value, p, process) for key, value in entry.items()}
                for entry, p in entries
            ],
        }
        return tree | {"step": step | parts}

    def preallocate(self) -> None:
        """Allocates memory for the optimizer's state on a worker that will join, so that the group
        need not wait. It allocates two tensors per parameter, as Adam needs, and a master where
        there are some, and writes to them, since the first write to a page costs more than
        receiving it. It allocates nothing for a state that is divided among the members."""
        if self.holders.is_divided:
            return

        def spares(p: torch.Tensor) -> list[torch.Tensor]:
            local, (count, dtype) = local_of(p), state_kind(self.optimizer, p)
            large = p.requires_grad and local.nbytes >= _LARGE_BYTES
            return [torch.zeros_like(local, dtype=dtype) for _ in range(count if large else 0)]

        parameters = (p for group in self.optimizer.param_groups for p in group["params"])
        self._preallocated = [spares(p) for p in parameters]

    def own_tensors(self, encoded: Any, specs: Sequence[TensorSpec]) -> dict[int, torch.Tensor]:
        """Returns the tensors of a worker without state that receive in place, by slot. These are
        parameters, buffers and preallocated optimizer state. `encoded` is the tree with slots for
        its tensors."""
        step = encoded["step"]
        buffers = dict(self.model.named_buffers())
        ours: dict[int, torch.Tensor] = {}
        for given, spares in zip(step["optimizer"], self._preallocated, strict=False):
            slots = [slot for x in given.values() if (slot := tensor_slot(x)) is not None]
            fitting = [s for s in slots if spares and specs[s].shape == spares[0].shape]
            ours |= zip(fitting, spares, strict=False)
        optimized = (p for group in self.optimizer.param_groups for p in group["params"])
        for given, p in zip(step["optimizer"], optimized, strict=False):
            for key, mine in self.optimizer.state.get(p, {}).items() if self._takes_parts else ():
                slot = tensor_slot(given.get(key))
                if slot is not None and isinstance(mine, torch.Tensor):
                    ours[slot] = local_of(mine)
        for given, mine in [
            *zip(step["parameters"], self.parameters.values(), strict=True),
            *((x, buffers[name]) for name, x in step["buffers"].items() if name in buffers),
        ]:
            slot = tensor_slot(given)
            if slot is not None:
                ours[slot] = local_of(mine)
        self._preallocated = []
        return ours

    def prepare_to_join(self, tree: Any, *, anew: bool) -> bool:
        """Makes the optimizer's state as large as in this tree, to be written in parts, and lets
        the same parameters require gradients. Returns whether the parameters of this worker lie in
        memory like those of the tree. `anew`: nothing of it has arrived before."""
        self._takes_parts = True
        self.optimizers.adopt_state(tree["step"])
        for entries in self.optimizer.state.values():
            for value in entries.values():
                # A number of steps may not be just any number. Large tensors arrive as a whole.
                if anew and isinstance(value, torch.Tensor) and value.nbytes < _LARGE_BYTES:
                    value.zero_()
        for p, flag in zip(self.parameters.values(), tree["body"]["requires_grad"], strict=True):
            p.requires_grad_(flag)
        pairs = zip(self.parameters.values(), tree["step"]["parameters"], strict=True)
        return all(p.data_ptr() == given.data_ptr() for p, given in pairs)

    @torch.no_grad()
    def adopt(self, tree: Any, *, body: bool) -> None:
        """Takes over what a step changes from a complete tree. With `body`, on a worker that joins,
        it also takes over what loop bodies change."""
        step = tree["step"]
        self.holders.take_over(step, joins=body)
        for mine, given in zip(self.parameters.values(), step["parameters"], strict=True):
            if local_of(mine).data_ptr() != given.data_ptr():
                local_of(mine).copy_(given)
        buffers = dict(self.model.named_buffers())
        for name, given in step["buffers"].items():
            if buffers[name].data_ptr() != given.data_ptr():
                buffers[name].copy_(given)
        changeable = tree["body"] if body else step
        self.optimizers.adopt_state(step)
        self.optimizers.adopt_held(changeable["held"])
        self.holders.adopted(step, joins=body)
        for extra in self.extra:
            extra.write(changeable["extra_state"][extra.name])
        if self.loss_scale is not None:
            vars(self.loss_scale).update(step["loss_scale"])
        if self.previous is not None:
            self.previous.adopt(step["previous"])
        self.record = None if step["record"] is None else StepRecord(**step["record"])
        self.bad_row_groups = set(step["bad_row_groups"])
        self.kinds = list(step["kinds"])
        self.inexact_because = list(step.get("inexact_because", ()))  # older states have none
        if body:
            for key, value in tree["body"]["user"].items():
                if key in self.user or not key.startswith(OWN):
                    with _given(f"load_state_dict of the object {key!r} of state="):
                        self.user[key].load_state_dict(value)
            for p, flag in zip(
                self.parameters.values(), tree["body"]["requires_grad"], strict=True
            ):
                p.requires_grad_(flag)
            set_modes(self.model, tree["body"]["training"])
        self.note_commit()
        if body:
            self.optimizers.committed = step["held"]

    def digest(self) -> str:
        """Returns the SHA-256 of names, shapes, dtypes and bytes of parameters and buffers."""
        digest = hashlib.sha256()
        for name, tensor in [*self.parameters.items(), *self.model.named_buffers()]:
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
            tensor = whole_of(tensor)  # all processes of this worker call this
            if tensor is None:
                continue  # the first process has the digest
            flat = tensor.detach().cpu().contiguous().as_strided((tensor.numel(),), (1,))
            digest.update(flat.view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


def layout_of(
    parameters: Mapping[str, torch.Tensor],
    buffers: Mapping[str, torch.Tensor],
    extra_states: Iterable[str],
    optimizer: str,
    groups: Iterable[Iterable[str]],
    user: Iterable[str],
) -> dict[str, str]:
    """Returns the layout of a state, as texts by what they describe. `groups`: the names of the
    optimizer's parameters. `user`: the keys of `state=`."""
    tensors = {f"parameter {name}": p for name, p in parameters.items()}
    tensors |= {f"buffer {name}": buffer for name, buffer in buffers.items()}
    return {
        **{what: f"{tuple(tensor.shape)} of {tensor.dtype}" for what, tensor in tensors.items()},
        **{f"get_extra_state of {name}": "there" for name in extra_states},
        "the optimizer": optimizer,
        **{f"{p} in the optimizer": f"group {n}" for n, names in enumerate(groups) for p in names},
        "the keys of state=": str(sorted(key for key in user if not key.startswith(OWN))),
    }


@dataclass(frozen=True)
class ExtraState:
    """The extra state of one module (`torch.nn.Module.get_extra_state`) as bytes, which can be
    compared, sent and stored without knowing their meaning. `name` is its key in the model's
    state_dict."""

    name: str
    module: nn.Module

    def read(self) -> bytes:
        """Returns the present extra state. Raises ModelError if it cannot be stored."""
        try:
            return to_bytes({"value": self.module.get_extra_state()})
        except StateError as error:
            at = "" if error.path == "value" else f" at {error.path.removeprefix('value.')}"
            raise ModelError(
                f"get_extra_state of model.{self.name.removesuffix(_EXTRA).rstrip('.')} "
                f"returns{at} {error.reason}, which cannot be sent to a worker that joins. "
                "Return tensors, numbers and containers of them"
            ) from None

    def write(self, content: bytes) -> None:
        """Sets the extra state, unless the module already has it."""
        if content != self.read():
            with _given(f"set_extra_state of {self.name}"):
                self.module.set_extra_state(from_bytes(content)["value"])


def set_modes(model: nn.Module, training: Sequence[bool]) -> None:
    """Sets `training` of each module. Where other code has made the model, with more modules or
    fewer, what it has set counts."""
    modules = list(model.modules())
    if len(modules) == len(training):
        for module, flag in zip(modules, training, strict=True):
            module.training = flag


@contextlib.contextmanager
def _given(what: str) -> Iterator[None]:
    """Raises ModelError if user code raises, to which a part of the state is given."""
    try:
        yield
    except Exception as error:  # user code may raise anything
        raise ModelError(
            f"{what} does not take the state that the run has: {type(error).__name__}: {error}. "
            "Correct it or, if the code has changed since the checkpoint was made, bring the old "
            "code back or use a new name= for a new run"
        ) from error


def extra_states(model: nn.Module) -> list[ExtraState]:
    """Returns the modules of the model that have extra state, in the model's order."""
    return [
        ExtraState(f"{prefix}.{_EXTRA}" if prefix else _EXTRA, module)
        for prefix, module in model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    ]
