"""Micro-batches of rows of similar length: the rows of a few steps are sorted by length.

A *window* is `WINDOW` consecutive steps of an epoch; the last one may have fewer, and so may one
behind which the batch grows. The rows that a virtual worker has in a window stay its rows of that
window. They are sorted by length, cut into micro-batches, and these are dealt to the steps of the
window in an order of (seed, first step) that all virtual workers share. So the micro-batches of one
step have similar lengths, too, whichever workers run them.

The result is a function of (seed, step, virtual worker) and of the lengths of the window's rows,
which are known once they are read. Nothing is stored, and each row comes as often as before.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from elastic_dp.sampling.epoch_order import Ints
from elastic_dp.sampling.keyed_permutation import derive, permute

WINDOW = 50  # steps, as Hugging Face's LengthGroupedSampler has batches; changes the order
_STEPS = 8  # the purpose of a key; 1 to 7 are used by `Order`, `Mixture` and `PackedOrder`


def window_of(step: int, steps: range) -> range:
    """Return the steps of the window of `step`, which is one of `steps`: those of its epoch, or the
    part of it with the same number of virtual workers.
    """
    first = steps.start + (step - steps.start) // WINDOW * WINDOW
    return range(first, min(first + WINDOW, steps.stop))


def grouped(
    window: range, lengths: Sequence[int] | Ints, sizes: Sequence[int], seed: int
) -> list[Ints]:
    """Return which rows of a window the micro-batch of each of its steps has, shortest row first.

    `lengths` [rows] are those of the virtual worker's rows in the window, in the order without
    groups, and `sizes` [steps] the numbers of rows of its micro-batches. Rows of equal length keep
    their order.
    """
    key = np.uint64(derive(_STEPS, seed, window.start))
    steps = permute(np.arange(len(window)), np.uint64(len(window)), key)
    cuts = np.cumsum(np.asarray(sizes)[steps])[:-1]
    parts = np.split(np.argsort(lengths, kind="stable"), cuts)
    found = dict(zip(steps.tolist(), parts, strict=True))
    return [found[number] for number in range(len(window))]
