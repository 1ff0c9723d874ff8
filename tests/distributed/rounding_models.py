"""The roundings of `wire=` written once more, in NumPy and block by block, and the tree they are
for."""

import hashlib
from typing import Any

import numpy as np

from elastic_dp.distributed.reduction_tree import middle

Numbers = np.ndarray[Any, Any]
BLOCK = 256


def nearest_bf16(x, node, first, seed=0):
    """The nearest bfloat16, ties to even, as fp32: the upper half of the bits."""
    bits = x.view(np.uint32).astype(np.uint64)
    upper = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return (upper << 16).astype(np.uint32).view(np.float32)


def random_int8(x, node, first, seed=0):
    """Each block of 256 as whole numbers times the least power of two for which they fit."""
    blocks = np.zeros((-(-x.size // BLOCK), BLOCK), np.float32)
    blocks.reshape(-1)[: x.size] = x.reshape(-1)
    for number, block in enumerate(blocks, first):
        largest = np.abs(block).max()
        exponent = next(e for e in range(-126, 122) if largest <= 127 * 2.0**e)
        noise = drawn(seed, node, number).astype(np.float32) / np.float32(1 << 16)
        whole = np.rint(block * np.float32(2.0**-exponent) + noise)
        block[:] = whole * np.float32(2.0**exponent) + 0.0  # no -0.0
    return blocks.reshape(-1)[: x.size].reshape(x.shape)


def drawn(seed, node, block):
    """An odd number of 16 bits for each element of a block."""
    words = b"".join(part.to_bytes(8, "little") for part in (seed, *node))
    key = [int(k) for k in np.frombuffer(hashlib.blake2b(words, digest_size=8).digest(), "<u4")]
    halves = []
    for counter in range(block * 128, block * 128 + 128):
        x = (counter + key[0]) % 2**32
        x = (x ^ x >> 16) * 0x85EBCA6B % 2**32
        x = (x + key[1]) % 2**32
        x = (x ^ x >> 13) * 0xC2B2AE35 % 2**32
        x ^= x >> 16
        halves += [x & 0xFFFF, x >> 16]
    return np.array(halves, np.uint16).view(np.int16) | 1


ROUNDINGS = {"bf16": nearest_bf16, "int8": random_int8}


def rounded_sum(node, leaf, wire, first, seed=0):
    """Return Q(leaf) or Q(l + r); None if no leaf of the node has a gradient."""
    rounding = ROUNDINGS[wire]
    if node[1] - node[0] == 1:
        one = leaf(node[0])
        return None if one is None else rounding(one, node, first, seed)
    split = middle(node)
    parts = [
        rounded_sum(part, leaf, wire, first, seed) for part in ((node[0], split), (split, node[1]))
    ]
    there = [part for part in parts if part is not None]
    return (
        rounding(there[0] + there[1], node, first, seed)
        if len(there) == 2
        else (there or [None])[0]
    )
