"""Torch's communication hooks for DDP, called on the buckets of fast mode.

A hook takes a bucket and returns a future of its average. Torch's are called as they are, with
objects that have what these use of `GradBucket`, of a process group and of a future:

- Collectives are this package's, so that an abort frees who waits for one. They are launched, and
  callbacks run, on the thread that trains, in the same order on all members. (With DDP on Gloo,
  Gloo's threads run callbacks, and launch what these reduce in an order of their own.)
- What a hook remembers, PowerSGD's errors and its P and Q, is that of one generation, in which each
  step is committed. So nothing of an aborted step is left, and no worker needs what another one
  remembers. A generation begins as a run does: without errors, and with a Q that is drawn from the
  job's seed and the step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    bf16_compress_hook,
    fp16_compress_hook,
)
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from elastic_dp.distributed.gradient_buckets import GradientBucket, GradientLayout
from elastic_dp.distributed.local_shards import local_of
from elastic_dp.distributed.process_group import Transport

# Each takes a state and a bucket.
_HOOKS: Mapping[str, Callable[[Any, Any], Any]] = {
    "bf16": bf16_compress_hook,
    "fp16": fp16_compress_hook,
}
_POWER_SGD: Callable[[Any, Any], Any] = powerSGD_hook
_SEEDS = 1 << 32  # of NumPy's `RandomState`


class HookSettings(NamedTuple):
    """A hook by its name: "bf16", "fp16" or "powersgd", which has `options`, the arguments of
    `PowerSGDState`."""

    name: str
    options: Mapping[str, Any] = {}

    def open(self, transport: Transport) -> CommHook | None:
        """Returns the hook for a generation; None: a lone member has nothing to compress."""
        return CommHook(self, transport) if transport.world_size > 1 else None


class CommHook:
    """One hook, for the buckets of one generation."""

    def __init__(self, settings: HookSettings, transport: Transport) -> None:
        self._settings = settings
        self._group = _HookGroup(transport)
        self._power: PowerSGDState | None = None
        self._layout: GradientLayout | None = None  # of the last step that was begun
        self._step = 0  # its number

    def begin(self, step: int, seed: int, layout: GradientLayout) -> None:
        """Starts a step (from 1). One that is begun again finds nothing of its first attempt, and
        other buckets than those of the step before it nothing either."""
        if self._settings.name not in _HOOKS:
            if self._power is None or step <= self._step or layout is not self._layout:
                self._power = PowerSGDState(self._group, **self._settings.options)
            self._power.iter = step - 1
            self._power.rng.seed(seed % _SEEDS)  # a Q that is drawn is the same on all members
        self._step, self._layout = step, layout
        self._group.operations = []

    def launch(self, bucket: GradientBucket, flat: torch.Tensor) -> HookFuture:
        """Starts to reduce `flat`, of shape (bucket.numel,). Waited for, it is the sum over all
        members, compressed. Raises GroupError, and so does the future."""
        # A hook averages. What it is given is of the size of DDP's, the mean of a worker's rows.
        flat.mul_(self._group.size())
        given = HookBucket(bucket, flat)
        if self._power is not None:
            future = _POWER_SGD(self._power, given)
        else:
            future = _HOOKS[self._settings.name](self._group, given)
        assert isinstance(future, HookFuture)
        return future

    def is_over(self) -> bool:
        """Returns whether no operation of the step can access a bucket any more."""
        transport = self._group.transport
        return all(map(transport.is_over, self._group.operations))


class HookBucket:
    """What torch's hooks use of `torch.distributed.GradBucket`."""

    def __init__(self, bucket: GradientBucket, flat: torch.Tensor) -> None:
        self._bucket, self._flat = bucket, flat

    def buffer(self) -> torch.Tensor:
        return self._flat

    def index(self) -> int:
        return self._bucket.number

    def is_last(self) -> bool:
        return self._bucket.is_last

    def gradients(self) -> list[torch.Tensor]:
        """Returns views into the buffer, in the shapes of the parameters (whatever their strides,
        as in DDP), (1,) for that of a scalar, without empty ones."""
        cuts = zip(map(local_of, self._bucket.parameters), self._bucket.cuts, strict=False)
        return [
            self._flat[first : first + p.numel()].view(p.shape or (1,))
            for p, first in cuts
            if p.numel()
        ]


class HookFuture:
    """What torch's hooks use of `torch.futures.Future`. Callbacks run when it is waited for."""

    def __init__(self, resolve: Callable[[], Any]) -> None:
        self._resolve: Callable[[], Any] | None = resolve
        self._value: Any = None

    def then(self, callback: Callable[[HookFuture], Any]) -> HookFuture:
        def resolve() -> Any:
            self.wait()
            return callback(self)

        return HookFuture(resolve)

    def wait(self) -> Any:
        """Returns the value. Raises GroupError."""
        if self._resolve is not None:
            self._value, self._resolve = self._resolve(), None
        return self._value

    value = wait


class _HookGroup:
    """What torch's hooks use of a process group, by `torch.distributed.all_reduce`."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.operations: list[Any] = []  # of the present step

    def size(self) -> int:
        return self.transport.world_size

    def allreduce(self, tensors: Sequence[torch.Tensor], options: Any) -> _HookWork:
        """Sums the one tensor over all members, in place."""
        (tensor,) = tensors
        if not tensor.numel():  # PowerSGD has one if it compresses all gradients of a bucket
            return _HookWork(HookFuture(lambda: [tensor]))
        operation = self.transport.all_reduce(tensor)
        self.operations.append(operation)

        def resolve() -> list[torch.Tensor]:
            self.transport.wait(operation)
            return [tensor]

        return _HookWork(HookFuture(resolve))


class _HookWork:
    """What torch's hooks use of `torch.distributed.Work`."""

    def __init__(self, future: HookFuture) -> None:
        self._future = future

    def get_future(self) -> HookFuture:
        return self._future
