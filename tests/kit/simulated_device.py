"""A device with the semantics of CUDA and NCCL, on the processor, for tests without a GPU.

- Each thread that launches has a stream, which another thread works through. `wait` on a collective
  returns at once: from then on whatever the thread launches is queued behind the collective, until
  an event behind it has passed. Outputs hold NaN, or 0xFF, until they are computed.
- The read guard: to read a value on the host meanwhile raises `ReadBeforeEvent`.
- A collective whose peer is gone spins until it is aborted, and then leaves its output as it is.
- To connect takes time, or never ends; aborting and destroying may block.
- After a failure, torch's watchdog may end the process, as in a job in which nobody goes on alone.

What a thread launches outside of these windows is done at once, as the processor does it: a device
that is always fast.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.nn.utils import clip_grad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from elastic_dp.device.accelerator import Accelerator, install
from elastic_dp.threads import background

_POLL_S = 0.0002
_ABORTED = 134  # the exit status after SIGABRT


class ReadBeforeEvent(AssertionError):
    """The host reads what the device may not have computed yet."""


@dataclass(frozen=True, slots=True)
class SimulatedDevice:
    """Settings of the device of one process."""

    connect_s: float = 0.0  # that connecting takes
    connect_hangs: bool = False  # ... it never ends
    connect_fails: int = 0  # the first attempts of a run that fail, each on all its members
    abort_frees: bool = True  # collectives that spin end by an abort
    abort_s: float = 0.0  # that aborting blocks, after it has freed the collectives; inf: for ever
    reports_failures: bool = False  # the communicator notices that a peer is gone
    # After how long torch's watchdog ends the process for a failure, and its monitor for an abort
    # that blocks, unless the environment turns them off; 0: never.
    watchdog_s: float = 0.0
    destroy_s: float = 0.0  # that destroying blocks; inf: for ever

    address = "127.0.0.1"  # as `elastic_dp.testing`'s Host

    def enter(self) -> None:
        """This process computes on such a device from now on."""
        install(SimulatedAccelerator(self))

    def host_of(self, worker: str, node: int) -> SimulatedDevice:
        """For `ProcessRun`."""
        return self


class _SimulatedStream:
    """What one thread has launched, done in order by another."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Callable[[], Any] | threading.Event] = queue.SimpleQueue()
        self.pending = 0  # operations
        self._lock = threading.Lock()
        self._deferred: contextlib.ExitStack | None = None
        background("device", self._run).start()

    def put(self, work: Callable[[], Any]) -> None:
        with self._lock:
            self.pending += 1
        self._queue.put(work)

    def mark(self, passed: threading.Event) -> None:
        """Sets `passed` once all of it is done."""
        self._queue.put(passed)

    def defer(self) -> None:
        """From now on the calling thread's operations are queued."""
        if self._deferred is None:
            self._deferred = contextlib.ExitStack()
            self._deferred.enter_context(_ReadGuard())
            self._deferred.enter_context(_Deferred(self))

    def catch_up(self) -> None:
        """The calling thread's operations are done at once again."""
        if self._deferred is not None and not self.pending:
            self._deferred.close()
            self._deferred = None

    def _run(self) -> None:
        # The version of a tensor was raised when the operation was launched.
        with torch.no_grad(), torch._C._AutoDispatchBelowADInplaceOrView():
            while True:
                work = self._queue.get()
                if isinstance(work, threading.Event):
                    work.set()  # by now what was launched before it is not pending
                    continue
                work()
                with self._lock:
                    self.pending -= 1


class _ReadGuard(TorchFunctionMode):
    """Refuses the ways to the host that are no operation where a tensor is there already."""

    READS = frozenset({"cpu", "numpy", "tolist", "to"})
    ALLOWED = clip_grad.__file__  # torch's clipping: from one device of gradients to another

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in self.READS and sys._getframe(1).f_code.co_filename != self.ALLOWED:
            raise ReadBeforeEvent(f"Tensor.{name} before the event has passed")
        return func(*args, **(kwargs or {}))


# Arguments that operations write although their schema does not say so.
_ALSO_WRITTEN = {"native_batch_norm": ("running_mean", "running_var")}


class _Deferred(TorchDispatchMode):
    """Queues the operations of a thread. What returns a new tensor is done at once with whatever
    the inputs hold, for the sake of its shape, and once more in its turn; what it writes meanwhile
    are copies. Random numbers are drawn at once, as the host of a GPU determines them: by its
    seed and the number of those before them. Raises NotImplementedError for what cannot be done
    twice."""

    READS = frozenset({"_local_scalar_dense", "equal", "is_nonzero", "nonzero", "item"})
    # What these draw does not depend on what the inputs hold.
    FILLS = frozenset(
        f"{name}_"
        for name in (
            *("bernoulli", "cauchy", "exponential", "geometric"),
            *("log_normal", "normal", "random", "uniform"),
        )
    )
    LIKE = frozenset({"rand_like", "randint_like", "randn_like"})

    def __init__(self, stream: _SimulatedStream) -> None:
        super().__init__()
        self._stream = stream

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.partition("::")[2]
        if name in self.READS:
            raise ReadBeforeEvent(f"aten::{name} before the event has passed")
        given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
        written = [
            given[argument.name]
            for argument in func._schema.arguments
            if (argument.alias_info is not None and argument.alias_info.is_write)
            or argument.name in _ALSO_WRITTEN.get(name, ())
        ]
        has_inputs = any(isinstance(x, torch.Tensor) for x in tree_leaves((args, kwargs)))
        if torch.Tag.nondeterministic_seeded in func.tags and has_inputs:
            return self._draw(func, name, args, kwargs)
        returns_new = [value.alias_info is None for value in func._schema.returns]
        if written and not any(returns_new):
            self._stream.put(partial(func, *args, **kwargs))
            if not func._schema.returns:
                return None
            return written[0] if len(func._schema.returns) == 1 else tuple(written)
        if written and not all(returns_new):
            raise NotImplementedError(f"the simulated device cannot queue aten::{name}")
        copies = {id(one): one.clone() for one in written if one is not None}
        mine, named = tree_map(lambda value: copies.get(id(value), value), (args, kwargs))
        result = func(*mine, **named)
        if any(returns_new) and has_inputs:
            self._stream.put(partial(_do_again, func, args, kwargs, result))
        return result

    def _draw(self, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        if name in self.LIKE:
            return func(*args, **kwargs)
        if name not in self.FILLS:
            raise NotImplementedError(f"the simulated device cannot draw aten::{name} in its turn")
        target = args[0]
        drawn = torch.empty_strided(target.shape, target.stride(), dtype=target.dtype)
        func(drawn, *args[1:], **kwargs)
        self._stream.put(partial(target.copy_, drawn))
        return target


def _do_again(func: Any, args: Any, kwargs: Any, result: Any) -> None:
    for old, new in zip(tree_leaves(result), tree_leaves(func(*args, **kwargs)), strict=True):
        if isinstance(old, torch.Tensor):
            old.copy_(new)


class _Event:
    def __init__(self, stream: _SimulatedStream) -> None:
        self._stream, self._passed = stream, threading.Event()
        stream.mark(self._passed)

    def query(self) -> bool:
        if not self._passed.is_set():
            return False
        self._stream.catch_up()
        return True


class SimulatedAccelerator(Accelerator):
    asynchronous = True

    def __init__(self, settings: SimulatedDevice | None = None) -> None:
        self.settings = settings or SimulatedDevice()
        self._of_thread = threading.local()

    @property
    def stream(self) -> _SimulatedStream:
        if not hasattr(self._of_thread, "stream"):
            self._of_thread.stream = _SimulatedStream()
        stream: _SimulatedStream = self._of_thread.stream
        return stream

    def record(self) -> _Event:
        return _Event(self.stream)

    def host_memory(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def copy_to_host(self, target: torch.Tensor, source: torch.Tensor) -> None:
        poison(target)
        self.stream.put(partial(target.copy_, source))

    def communicator(
        self, store: Any, rank: int, world_size: int, timeout_s: float
    ) -> SimulatedCommunicator:
        return SimulatedCommunicator(self, store, rank, world_size, timeout_s)


def poison(tensor: torch.Tensor) -> None:
    """Fills it with what no result is."""
    if tensor.is_floating_point():
        tensor.fill_(torch.nan)
    else:
        tensor.view(-1).view(torch.uint8).fill_(0xFF)


class _Work:
    """A collective in a stream. `wait` orders, and does not wait."""

    def __init__(self, stream: _SimulatedStream) -> None:
        self._stream = stream

    def wait(self) -> bool:
        self._stream.defer()
        return True


class SimulatedCommunicator:
    """Implements `Communicator`, over Gloo."""

    def __init__(
        self,
        accelerator: SimulatedAccelerator,
        store: Any,
        rank: int,
        world_size: int,
        timeout_s: float,
    ) -> None:
        self._timeout_s = timeout_s
        self._accelerator, self._settings = accelerator, accelerator.settings
        self._store, self._rank, self._world_size = store, rank, world_size
        self._aborted = threading.Event()
        self._connecting = threading.Lock()
        self._failure: str | None = None
        # Read when the group is made, as torch does.
        self._handles_errors = os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3") != "0"
        self._monitors = os.environ.get("TORCH_NCCL_ENABLE_MONITORING", "1") != "0"
        self._backend: Any = None

    def connect(self, check: Callable[[], None]) -> None:
        with self._connecting:  # torch holds a lock that an abort needs
            self._connect(check)

    def _connect(self, check: Callable[[], None]) -> None:
        if self._settings.connect_hangs:
            self._aborted.wait(self._timeout_s)
            raise RuntimeError("NCCL timeout while it connects")
        time.sleep(self._settings.connect_s)
        check()
        if self._settings.connect_fails and self._world_size > 1:
            number = _number_of(self._store, self._rank, self._world_size)
            if number <= self._settings.connect_fails:
                raise RuntimeError("no route to a peer")
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=self._timeout_s)
        backend = dist.ProcessGroupGloo(self._store, self._rank, self._world_size, options)
        backend._set_default_timeout(timedelta(hours=1))
        self._backend = backend

    def abort(self) -> None:
        with self._connecting:
            if self._settings.abort_frees:
                self._aborted.set()
        monitor = self._end_process() if self._monitors else None
        _block(self._settings.abort_s)
        if monitor is not None:
            monitor.cancel()

    def failure(self) -> str | None:
        return self._failure if self._settings.reports_failures else None

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            # A stream of a real device owns no communicator.
            if threading.current_thread().name != "device":
                _block(self._settings.destroy_s)

    def all_reduce(self, tensor: torch.Tensor) -> _Work:
        given = tensor.clone()
        return self._launch(
            tensor, given, lambda: self._backend.allreduce([given], c10d.AllreduceOptions())
        )

    def all_to_all(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
    ) -> _Work:
        sizes, result = (list(output_sizes), list(input_sizes)), torch.empty_like(output)
        options = c10d.AllToAllOptions()
        return self._launch(
            output, result, lambda: self._backend.alltoall_base(result, input, *sizes, options)
        )

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> _Work:
        # A clone, since the input may be this rank's part of the output.
        result, given, options = torch.empty_like(output), input.clone(), c10d.AllgatherOptions()
        return self._launch(
            output, result, lambda: self._backend._allgather_base(result, given, options)
        )

    def _launch(
        self, output: torch.Tensor, result: torch.Tensor, start: Callable[[], Any]
    ) -> _Work:
        poison(output)
        stream = self._accelerator.stream
        stream.put(partial(self._do, output, result, start))
        return _Work(stream)

    def _do(self, output: torch.Tensor, result: torch.Tensor, start: Callable[[], Any]) -> None:
        """Gloo writes to memory of its own, so nothing arrives after an abort."""
        if self._aborted.is_set():
            return
        failed, work = False, None
        try:
            work = start()
        except RuntimeError:
            failed = True
            self._fail()
        while failed or (work is not None and not work.is_completed()):
            if self._aborted.wait(_POLL_S):
                self._fail()  # the watchdog does not know who aborted
                _never_dropped.append((self._backend, work, result))
                return
        assert work is not None
        try:
            work.wait()
        except RuntimeError:
            self._fail()
            self._aborted.wait()
            return
        output.copy_(result)

    def _fail(self) -> None:
        self._failure = "the connection to a peer has ended"
        if self._handles_errors:
            self._end_process()

    def _end_process(self) -> threading.Timer | None:
        """Ends it after a while, also when nobody uses this communicator any more."""
        if not self._settings.watchdog_s:
            return None
        timer = threading.Timer(self._settings.watchdog_s, os._exit, (_ABORTED,))
        timer.daemon = True
        timer.start()
        return timer


_attempts = 0  # to connect, as far as this process knows


def _number_of(store: dist.Store, rank: int, world_size: int) -> int:
    """The number of an attempt to connect among those of a run: the same on all its members, also
    where one of them has left out the attempt before."""
    global _attempts
    store.set(f"simulated/{rank}", str(_attempts + 1))
    _attempts = max(int(store.get(f"simulated/{r}")) for r in range(world_size))
    return _attempts


def _block(seconds: float) -> None:
    threading.Event().wait(None if seconds == math.inf else seconds)


_never_dropped: list[Any] = []  # Gloo's destructor blocks until its last operation ends
