"""Memory of the arrays that are handed out: where it begins, and that of old ones for the next.

Every array begins at a multiple of 64 bytes, as torch's own memory does. MKL computes a matrix
product in another order of additions where its input does not begin at one of 16, and where a
micro-batch lies in a larger array depends on the fleet; so the last bits of a result would.

The kernel's price for fresh memory is more than that of the copy into it: with the same memory
again, mapped Arrow arrives a fifth faster, and shuffled Parquet too. A block comes back when the
last array or tensor that lies in it is gone, and not before; whoever keeps a micro-batch keeps its
block.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

ALIGNED_TO = 64  # bytes
SMALLEST_BYTES = 1 << 20  # below, malloc does the same
_WASTE = 2  # a block may be so many times as large as what is asked for


class BlockPool:
    """Of one data set, for all its threads. At most `kept` blocks wait to be used again."""

    def __init__(self, kept: int) -> None:
        self._lock = threading.Lock()
        self._free: deque[npt.NDArray[np.uint8]] = deque(maxlen=kept)  # the oldest gives way

    def empty(self, shape: Sequence[int], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """As `np.empty`, and aligned."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes < SMALLEST_BYTES:
            return empty_bytes(nbytes).view(dtype).reshape(shape)
        block = self._pick(nbytes)
        if block is None:
            block = empty_bytes(nbytes)
        # All pieces of it, tensors too, refer to this one array, since what lies below it is none.
        whole = np.frombuffer(block.data, np.uint8)
        weakref.finalize(whole, self._free.append, block).atexit = False
        return whole[:nbytes].view(dtype).reshape(shape)

    def _pick(self, nbytes: int) -> npt.NDArray[np.uint8] | None:
        with self._lock:  # blocks come back without it, in whatever thread lets go of them
            for _ in range(len(self._free)):
                block = self._free.popleft()
                if nbytes <= block.nbytes <= _WASTE * nbytes:
                    return block
                self._free.append(block)
        return None


def is_aligned(array: npt.NDArray[Any]) -> bool:
    return _address(array) % ALIGNED_TO == 0


def aligned(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Itself, or a copy."""
    return array if is_aligned(array) else aligned_copy(array)


def aligned_copy(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    copy = empty_bytes(array.nbytes).view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def empty_bytes(nbytes: int) -> npt.NDArray[np.uint8]:
    """Aligned."""
    memory = np.empty(nbytes + ALIGNED_TO, np.uint8)
    first = -_address(memory) % ALIGNED_TO
    return memory[first : first + nbytes]


def _address(array: npt.NDArray[Any]) -> int:
    return int(array.__array_interface__["data"][0])
