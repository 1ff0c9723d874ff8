"""What one process knows of the worker that it is a part of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch.distributed.device_mesh import DeviceMesh


class GangExchange(Protocol):
    """What the processes of a worker tell each other."""

    def exchange(self, payload: bytes) -> list[bytes]:
        """Returns the payloads of all processes, in order. All of them call it."""
        ...

    def scatter(self, parts: Sequence[bytes]) -> bytes:
        """The first process gives each of the others its part, in order. Returns the part of this
        process. All of them call it."""
        ...


@dataclass(frozen=True, slots=True)
class Gang:
    """The processes of one worker, over which `fully_shard` divides the model. Each has rows of its
    own. `number` is that of this process, from 0."""

    number: int
    size: int
    mesh: DeviceMesh
    control: GangExchange
    helps_to_gather: bool = False  # the first process takes checkpoints

    def exchange(self, payload: bytes) -> list[bytes]:
        """Returns the payloads of all processes, in order. All of them call it."""
        return self.control.exchange(payload)

    def micro_batch(self, virtual_worker: int) -> int:
        """Returns the number of this process's micro-batch of a virtual worker, among those of
        all."""
        return virtual_worker * self.size + self.number
