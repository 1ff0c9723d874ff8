"""How fast this worker computes: its seconds per virtual worker, by which virtual workers are
assigned.

The time covers the worker's own work, from a forward pass whose batch is ready to the end of the
backward pass and its sums, without waits for data and for other workers. The value is the median of
the last steps of the present generation; with fewer than `STEPS` of them it is 0. On a GPU, which
runs asynchronously to its host, it is measured by events in the stream.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from elastic_dp.device.gpu import instant, is_gpu, seconds_between

STEPS = 16


class ComputeSpeed:
    """Measures one worker. `tell` receives the value after each step; None: nothing is measured."""

    def __init__(self, device: torch.device, tell: Callable[[float], None] | None) -> None:
        self.measures = tell is not None
        self._tell, self._on_gpu, self._micro_batches = tell, is_gpu(device), 1
        self._instant: Callable[[], Any] = instant if self._on_gpu else time.perf_counter
        self._steps: deque[float] = deque(maxlen=STEPS)
        self._instants: list[Any] = []  # in this step: begin, end, begin, end, …

    def open(self) -> None:
        """Starts a generation."""
        self._steps.clear()
        if self._tell is not None:
            self._tell(0.0)

    def begin(self, micro_batches: int = 1) -> None:
        """Starts a step, or repeats one. `micro_batches`: of a virtual worker in it."""
        self._instants.clear()
        self._micro_batches = micro_batches

    def start_micro_batch(self) -> None:
        if self.measures:
            self._instants.append(self._instant())

    def end_micro_batch(self) -> None:
        if len(self._instants) % 2:
            self._instants.append(self._instant())

    def end_step(self) -> None:
        """Ends a step, when the device has finished all of its virtual workers."""
        if self._tell is None or not self._instants:
            return
        begins, ends = self._instants[::2], self._instants[1::2]
        took = seconds_between(begins, ends) if self._on_gpu else sum(ends) - sum(begins)
        self._steps.append(took / len(ends) * self._micro_batches)
        if len(self._steps) == STEPS:
            self._tell(sorted(self._steps)[STEPS // 2])
