"""Compares the weights of all members: their digests travel in a step's header every N steps.

A faulty replica (a flipped bit, a bad kernel) affects all others through its gradients. The run
therefore goes back to the last step after which all members agreed. That step's number travels with
the state.

Weights that go into a checkpoint are compared in the step after it. In other steps the comparison
costs one look at the step number. A digest is XXH3, at memory speed, on the host, and sums of the
bits on a device; the host waits only for these sums.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import NoReturn

import torch
import xxhash

from elastic_dp.coordinator.messages import ReplicaMismatch, WorkerId
from elastic_dp.distributed.local_shards import local_of
from elastic_dp.errors import GroupError

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class WeightComparison:
    """Compares weights after each step that is a multiple of `every`; None: never."""

    def __init__(self, parameters: Mapping[str, torch.Tensor], every: int | None) -> None:
        self._parameters, self._every = parameters, every
        self._wanted = 0
        self.members: tuple[WorkerId, ...] = ()
        self.agreed = 0  # after this step all members agreed, or read a checkpoint
        self.mismatch: ReplicaMismatch | None = None

    def compare_among(self, members: tuple[WorkerId, ...]) -> None:
        """Sets the members of the generation that begins."""
        self.members = members

    def agreed_at(self, step: int) -> None:
        """Records that the weights are those of all members after this step, or of its
        checkpoint."""
        self.agreed = step

    def compare_after(self, step: int) -> None:
        """Requests a comparison after this step, which goes into a checkpoint."""
        self._wanted = step

    def compares_updates(self, step: int, *, keeps: bool) -> bool:
        """Returns whether those who update the same part of a sharded state compare what they make
        in this step. `keeps`: it goes into a checkpoint."""
        return self._every is not None and (keeps or step % self._every == 0)

    def compare_updates(self, step: int, ranks: Collection[int]) -> None:
        """`ranks` are those that update the same part of a sharded state, and differ in the weights
        after `step`. Raises GroupError if there are any: no member may continue from that step."""
        if ranks:
            self._differ(step, tuple(self.members[rank] for rank in sorted(ranks)))

    def digest(self, step: int) -> str | None:
        """Returns the digest of the weights after `step`, or None if they are not compared."""
        if self._every is None or step <= self.agreed:
            return None
        if step % self._every and step != self._wanted:
            return None
        if len(self.members) == 1:
            self.agreed = step  # there is no other member
            return None
        return digest_of(list(self._parameters.values()))

    def compare(self, step: int, digests: Sequence[str | None]) -> None:
        """Compares the digests of all members, by rank.

        Raises GroupError if they differ: no member may continue from this step.
        """
        if not any(digests):
            return
        said = {w: d for w, d in zip(self.members, digests, strict=True) if d is not None}
        if len(set(said.values())) <= 1:
            self.agreed = step
            return
        usual, times = Counter(said.values()).most_common(1)[0]
        majority = times > len(said) / 2
        odd = tuple(worker for worker, d in said.items() if d != usual or not majority)
        self._differ(step, odd)

    def _differ(self, step: int, odd: tuple[WorkerId, ...]) -> NoReturn:
        self.mismatch = ReplicaMismatch(self.agreed, odd)
        raise GroupError(f"the weights of members differ after step {step}: {', '.join(odd)}")


def digest_of(tensors: Sequence[torch.Tensor]) -> str:
    """Returns a digest of the tensors' bytes, in this order."""
    digest = xxhash.xxh3_64()
    tensors = [local_of(tensor).detach().contiguous().view(-1) for tensor in tensors]
    for tensor in tensors:
        if tensor.device.type == "cpu":
            digest.update(tensor.view(torch.uint8).numpy().data)
    digest.update(str(sums_of([t for t in tensors if t.device.type != "cpu"])).encode())
    return digest.hexdigest()


def sums_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Returns the sum of each tensor's bits. The host waits for their devices."""
    return torch.stack(list(map(sum_of_bits, tensors))).tolist() if tensors else []


def sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the sum of a tensor's bits as integers, of shape () on its device. Any flipped bit
    changes it."""
    integers = torch.int32 if tensor.is_complex() else INTEGERS[tensor.element_size()]
    return tensor.view(integers).sum(dtype=torch.int64)
