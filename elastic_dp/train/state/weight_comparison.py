"""Compares the weights of all members: digests of them, exchanged in a step's header every so many
steps.

A replica that went wrong (a flipped bit, a bad kernel) changes all the others by its gradients. So
the run goes back to the last step after which all members agreed; that step's number travels with
the state.

Weights that go into a checkpoint are compared in the step after it. Other steps cost one look at
their number. A digest is XXH3 at the speed of memory on the host, and sums of the bits on a device;
only these are waited for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
import xxhash

from elastic_dp.coordinator.messages import ReplicaMismatch, WorkerId
from elastic_dp.errors import GroupError

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class WeightComparison:
    """`every`: compare after each step that it divides; None: never."""

    def __init__(self, parameters: Mapping[str, torch.Tensor], every: int | None) -> None:
        self._parameters, self._every = parameters, every
        self._wanted = 0
        self.members: tuple[WorkerId, ...] = ()
        self.agreed = 0  # after this step all members held the same, or read it from a checkpoint
        self.mismatch: ReplicaMismatch | None = None

    def compare_among(self, members: tuple[WorkerId, ...]) -> None:
        """Of the generation that begins."""
        self.members = members

    def agreed_at(self, step: int) -> None:
        """Our weights are those that all held after this step, or those of its checkpoint."""
        self.agreed = step

    def compare_after(self, step: int) -> None:
        """It goes into a checkpoint."""
        self._wanted = step

    def digest(self, step: int) -> str | None:
        """Of the weights after `step`, if they are to be compared."""
        if self._every is None or step <= self.agreed:
            return None
        if step % self._every and step != self._wanted:
            return None
        if len(self.members) == 1:
            self.agreed = step  # there is nobody to differ from
            return None
        return digest_of(list(self._parameters.values()))

    def compare(self, step: int, digests: Sequence[str | None]) -> None:
        """Those of all members, by rank. Raises GroupError if they differ: nobody may go on from
        here."""
        if not any(digests):
            return
        said = {w: d for w, d in zip(self.members, digests, strict=True) if d is not None}
        if len(set(said.values())) <= 1:
            self.agreed = step
            return
        usual, times = Counter(said.values()).most_common(1)[0]
        majority = times > len(said) / 2
        odd = tuple(worker for worker, d in said.items() if d != usual or not majority)
        self.mismatch = ReplicaMismatch(self.agreed, odd)
        raise GroupError(f"the weights of members differ after step {step}: {', '.join(odd)}")


def digest_of(tensors: Sequence[torch.Tensor]) -> str:
    """Of their bytes, in this order."""
    digest = xxhash.xxh3_64()
    tensors = [tensor.detach().contiguous().view(-1) for tensor in tensors]
    for tensor in tensors:
        if tensor.device.type == "cpu":
            digest.update(tensor.view(torch.uint8).numpy().data)
    digest.update(str(sums_of([t for t in tensors if t.device.type != "cpu"])).encode())
    return digest.hexdigest()


def sums_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Of their bits as integers, computed where they are: any one flipped bit changes one."""
    sums = [
        t.view(torch.int32 if t.is_complex() else INTEGERS[t.element_size()]).sum(dtype=torch.int64)
        for t in tensors
    ]
    return torch.stack(sums).tolist() if sums else []
