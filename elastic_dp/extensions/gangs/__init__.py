"""Workers of several processes, over which `fully_shard` divides the model."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import xxhash
from torch import nn

from elastic_dp.distributed.gradient_exchange import GradientExchange
from elastic_dp.distributed.local_shards import local_of
from elastic_dp.errors import LossError, ModelError, SpecError
from elastic_dp.extensions.gangs.gang_mesh import kind_of_gang
from elastic_dp.train.gang import Gang
from elastic_dp.train.step.micro_batch import Leaf
from elastic_dp.train.step.participants import StepParticipant, Verdict
from elastic_dp.train.step_builder import StepBuilder


def extend(build: StepBuilder) -> None:
    """Checks the arguments. Raises ModelError and SpecError. All processes of a worker call it:
    parts of the model are gathered, one after another."""
    gang = build.gang
    assert gang is not None
    orders = GradientOrders(gang)
    check_gang(gang, build.given.model, build.given.precision)
    build.note_gradient = orders.note
    build.kind_of = lambda own: kind_of_gang(gang, own, build.device)
    build.new_exchange = partial(GangReduction, gang)
    build.new_leaf = partial(Leaf, refuses_none=refuses_none(gang))
    build.new_participants.append(lambda: orders)


def check_gang(gang: Gang, model: nn.Module, precision: str | None) -> None:
    if precision == "fp16":
        raise SpecError(
            'precision="fp16" scales the loss, which does not work with processes_per_worker; '
            'use "bf16"'
        )
    for name, p in model.named_parameters():
        if getattr(p, "device_mesh", None) != gang.mesh:
            raise ModelError(
                f"model.{name} is not sharded over ctx.mesh: call fully_shard(model, "
                "mesh=ctx.mesh) for the whole model, before the optimizer is made"
            )
        if local_of(p).device.type != gang.mesh.device_type:
            raise ModelError(
                f"the local part of model.{name} is on {local_of(p).device}, and ctx.mesh is of "
                f"{gang.mesh.device_type} devices: leave out CPUOffloadPolicy, which does not work "
                "with processes_per_worker"
            )
    from torch.distributed.fsdp import FSDPModule  # takes a second, and few jobs need it

    gathered = _gathered_by_fully_shard(model) if isinstance(model, FSDPModule) else set()
    for name, p in model.named_parameters():
        if p not in gathered:
            raise ModelError(
                f"model.{name} is a DTensor over ctx.mesh, but not one of fully_shard, as with "
                "ignored_params or parallelize_module: its gradient would not be averaged among "
                "the processes of a worker, which have different rows. Let fully_shard have it"
            )


def _gathered_by_fully_shard(model: nn.Module) -> set[torch.nn.Parameter]:
    """Returns the parameters in whose place `fully_shard` puts whole ones for a forward pass."""
    from torch.distributed.fsdp import FSDPModule

    before = dict(model.named_parameters())
    gathered = set()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
            now = dict(model.named_parameters())
            gathered |= {p for name, p in before.items() if now[name] is not p}
            module.reshard()
    return gathered


class GangReduction(GradientExchange):
    """Each process sums the part of the gradient that it has, with the same process of the other
    workers. All processes compute the norm: the squares of their parts are added in order."""

    norm_is_on_host = True

    def __init__(self, gang: Gang, *given: Any, **more: Any) -> None:
        # The norm is computed while all processes of this worker are here.
        super().__init__(*given, **more | {"writes_to_gradients": lambda: True})
        self._gang, self.divided_by = gang, gang.size  # by `fully_shard`

    def _square(self, gradients: Sequence[torch.Tensor | None]) -> torch.Tensor:
        square = struct.pack("<d", float(super()._square(gradients)))
        squares = [struct.unpack("<d", given)[0] for given in self._gang.control.exchange(square)]
        return torch.tensor(sum(squares), dtype=torch.float64)


class GradientOrders(StepParticipant):
    """In which order the processes of a worker got their gradients. `fully_shard` runs a collective
    for each group of parameters when the model comes to it, and torch pairs what processes send by
    its order. A model that takes other layers for other rows pairs those of different layers, and
    where they have equal sizes, their values are mixed up without an error."""

    name = "gradient_order"

    def __init__(self, gang: Gang) -> None:
        self._gang, self._digest = gang, xxhash.xxh3_64()

    def begin(self, step: int) -> None:
        self._digest = xxhash.xxh3_64()

    def note(self, index: int) -> None:
        """The parameter with this number has got a gradient."""
        self._digest.update(index.to_bytes(4, "little"))

    def propose(self) -> bytes:
        return self._digest.digest()

    def agree(self, proposals: Sequence[bytes]) -> Verdict:
        size = self._gang.size
        for first in range(0, len(proposals), size):
            if len(set(proposals[first : first + size])) > 1:
                raise ModelError(
                    "the processes of a worker have got the gradients of this step in different "
                    "orders: the model runs other layers for other rows. torch pairs what the "
                    "processes send by its order, so all must run the same layers in the same order"
                )
        return None


def refuses_none(gang: Gang) -> Callable[[int, int], None]:
    """Returns what raises LossError where a process has no loss: the others would wait."""

    def refuse(step: int, virtual_worker: int) -> None:
        raise LossError(
            f"virtual worker {virtual_worker} has no gradient in step {step} on process "
            f"{gang.number} of its worker: its weight is 0, its loss is not finite, or its rows "
            "cannot be decoded. The other processes wait for its part of the backward pass, so "
            "each micro-batch needs one; return a loss of 0 that depends on the model"
        )

    return refuse
