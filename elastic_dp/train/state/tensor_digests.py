"""Digests of tensors, by which members compare their weights: XXH3, at memory speed, on the host,
and sums of the bits on a device. The host waits only for these sums."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import xxhash

from elastic_dp.distributed.local_shards import local_of

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest_of(tensors: Sequence[torch.Tensor]) -> str:
    """Returns a digest of the tensors' bytes, in this order."""
    digest = xxhash.xxh3_64()
    tensors = [local_of(tensor).detach().contiguous().view(-1) for tensor in tensors]
    tensors = [tensor for tensor in tensors if tensor.numel()]  # others may have a stride of 0
    for tensor in tensors:
        if tensor.device.type == "cpu":
            digest.update(tensor.view(torch.uint8).numpy().data)
    digest.update(str(sums_of([t for t in tensors if t.device.type != "cpu"])).encode())
    return digest.hexdigest()


def sums_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Returns the sum of each tensor's bits. The host waits for their devices."""
    return torch.stack(list(map(sum_of_bits, tensors))).tolist() if tensors else []


def sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the sum of a tensor's bits as integers, of shape () on its device."""
    return bits_of(tensor).sum(dtype=torch.int64)


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a view as integers, which compare equal for NaN and tell 0.0 from -0.0."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view(_INTEGERS[tensor.element_size()])


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(torch.equal(bits_of(one), bits_of(other)))
