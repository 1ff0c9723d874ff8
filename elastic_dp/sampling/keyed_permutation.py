"""A counter-based random generator: numbers as a function of their key, and a keyed permutation.

NumPy keeps its bit streams stable, but not what `permutation` makes of them. So everything that the
order of a run depends on is computed here, in integer arithmetic that gives the same result on
every platform. A golden test pins it.

`mix64_words` is the finalizer of SplitMix64 (Steele, Lea and Flood, 2014, with Stafford's "13"
constants). `permute` is a Feistel network over Z_a x Z_b with additions instead of XOR, so that it
fits any size: the generalized Feistel cipher of Black and Rogaway (2002), with cycle walking for
values outside the size.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_ROUNDS = 6


def derive(*parts: int) -> int:
    """Return a 64-bit key from non-negative integers of any size; their order matters."""
    key = len(parts)
    for part in parts:
        while True:
            key = (key ^ (part & _MASK)) + _GAMMA & _MASK
            key = ((key ^ (key >> 30)) * _FACTORS[0]) & _MASK
            key = ((key ^ (key >> 27)) * _FACTORS[1]) & _MASK
            key ^= key >> 31
            part >>= 64
            if not part:
                break
    return key


def permute(
    index: npt.NDArray[np.int64], size: Words | np.uint64, key: Words | np.uint64
) -> npt.NDArray[np.int64]:
    """Return where each `index` goes in the permutation of 0…size-1 that `key` selects.

    `size` and `key` are scalars, or arrays with one value per element of `index`. O(1) per element,
    without a table. Sizes are at most 2^52, so that the square root is exact enough to be the same
    on every platform.
    """
    out = index.astype(np.uint64)
    size, key = np.broadcast_to(size, out.shape), np.broadcast_to(key, out.shape)
    left_size = np.ceil(np.sqrt(size.astype(np.float64))).astype(np.uint64)
    right_size = (size + left_size - np.uint64(1)) // left_size
    todo = np.arange(out.size)  # elements that are not within 0…size-1 yet
    while todo.size:
        a, b = left_size[todo], right_size[todo]
        out[todo] = _feistel(out[todo], a, b, key[todo])
        todo = todo[out[todo] >= size[todo]]
    return out.astype(np.int64)


def _feistel(index: Words, a: Words, b: Words, key: Words) -> Words:
    left, right = index // b, index % b
    for number in range(0, _ROUNDS, 2):
        left = (left + _round(key, number, right) % a) % a
        right = (right + _round(key, number + 1, left) % b) % b
    return left * b + right


def _round(key: Words, number: int, half: Words) -> Words:
    """Return word (number, half) of the SplitMix64 sequence that starts at `key`."""
    return mix64_words((half + np.uint64(number << 32)) * np.uint64(_GAMMA) + key)


def mix64_words(words: Words) -> Words:
    """Return each element, mixed. Arrays wrap around silently, which is intended."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(_FACTORS[0])
    words = (words ^ (words >> np.uint64(27))) * np.uint64(_FACTORS[1])
    return words ^ (words >> np.uint64(31))
