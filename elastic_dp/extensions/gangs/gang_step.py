"""What is different in a step where a worker has several processes."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence

import torch
import xxhash

from elastic_dp.distributed.gradient_exchange import GradientExchange
from elastic_dp.distributed.gradient_norm import NO_CLIPPING, GradientClipping
from elastic_dp.errors import LossError, ModelError
from elastic_dp.train.gang import Gang
from elastic_dp.train.step.participants import StepParticipant, Verdict


class GangReduction(GradientExchange):
    """Each process sums the part of the gradient that it has, with the same process of the other
    workers. All processes compute the norm: the squares of their parts are added in order."""

    norm_is_on_host = True

    def __init__(
        self,
        gang: Gang,
        parameters: Iterable[torch.nn.Parameter],
        *,
        clipping: GradientClipping = NO_CLIPPING,
        writes_to_gradients: Callable[[], bool] = lambda: True,
    ) -> None:
        # The norm is computed while all processes of this worker are here.
        super().__init__(parameters, clipping=clipping, writes_to_gradients=lambda: True)
        self._gang, self.divided_by = gang, gang.size  # by `fully_shard`

    def _square(self, gradients: Sequence[torch.Tensor | None]) -> torch.Tensor:
        square = struct.pack("<d", float(super()._square(gradients)))
        squares = [struct.unpack("<d", given)[0] for given in self._gang.exchange(square)]
        return torch.tensor(sum(squares), dtype=torch.float64)


class GradientOrders(StepParticipant):
    """In which order the processes of a worker got their gradients.

    `fully_shard` runs a collective for each group of parameters when the model comes to it, and
    torch pairs what processes send by its order. A model that takes other layers for other rows
    pairs those of different layers, and where they have equal sizes, their values are mixed up
    without an error.
    """

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
    """Returns what raises LossError where a process of a gang has no loss to run backward from: the
    others would wait for it."""

    def refuse(step: int, virtual_worker: int) -> None:
        raise LossError(
            f"virtual worker {virtual_worker} has no gradient in step {step} on process "
            f"{gang.number} of its worker: its weight is 0, its loss is not finite, or its rows "
            "cannot be decoded. The other processes wait for its part of the backward pass, so "
            "each micro-batch needs one; return a loss of 0 that depends on the model"
        )

    return refuse
