"""Chooses the pieces whose copies, which a step has updated, are kept until its commit. They need
not be updated again then: that takes memory, and saves the time of small updates."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from itertools import accumulate

# In bytes of their state: all pieces that a member holds, if they are no more than this, or else
# the smallest: of one, and of all.
ALL_KEPT_BYTES = 32 << 20
SMALL_BYTES = 1 << 19
KEPT_BYTES = 4 << 20


def copies_to_keep(state_bytes: Mapping[int, int]) -> AbstractSet[int]:
    """Returns the smallest of the pieces that a member holds, or all of few. `state_bytes`: of the
    state of each."""
    if sum(state_bytes.values()) <= ALL_KEPT_BYTES:
        return set(state_bytes)
    small = sorted((size, n) for n, size in state_bytes.items() if size <= SMALL_BYTES)
    ends = accumulate(size for size, _ in small)
    return {n for (_, n), end in zip(small, ends, strict=True) if end <= KEPT_BYTES}
