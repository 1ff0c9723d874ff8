"""A GPU without a GPU, for what the simulated device does not show: operations over tensors of two
devices, and the calls to torch.cuda and to NCCL's process group.

Tensors of the host whose storage is marked count as the GPU's: they say `cuda:0`, what is computed
from them is marked, too, and what CUDA refuses raises `WrongDevice`. All is computed at once and
with the bits of the processor, so a run has the digest of one without a GPU.
"""

import contextlib
import threading
import time
import types
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType
from torch.overrides import TorchFunctionMode
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from elastic_dp.device import gpu
from elastic_dp.distributed.local_shards import local_of
from elastic_dp.train.exactness import machine_kind

GPU = torch.device("cuda", 0)
_HOST = torch.device("cpu")
_host_device = torch.Tensor.device
# Operations for which CUDA takes tensors of both, and those for which it takes no number of the
# host (a tensor without dimensions) either.
_MIXED = frozenset({"copy_", "_to_copy", "_foreach_copy_", "index", "index_put_", "set_", "detach"})
_STRICT = frozenset({"cat", "stack"})
_inside = threading.local()


class WrongDevice(RuntimeError):
    """What CUDA would refuse."""


def on_gpu(tensor):
    return hasattr(local_of(tensor).untyped_storage(), "is_fake_gpu")


def install(patch=setattr):
    """Torch finds a GPU from now on. `patch` sets attributes."""
    patch(torch.Tensor, "device", property(lambda t: GPU if on_gpu(t) else _host_device.__get__(t)))
    patch(torch.Tensor, "is_cuda", property(on_gpu))
    patch(torch.Tensor, "is_cpu", property(lambda tensor: not on_gpu(tensor)))
    for name, value in vars(_Cuda).items():
        if not name.startswith("__"):
            patch(torch.cuda, name, value)
    patch(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    patch(torch, "autocast", _Autocast)
    patch(dist, "ProcessGroupNCCL", _ProcessGroupNCCL)
    init_process_group = dist.init_process_group

    def init_gloo(*_, device_id=None, pg_options=None, **how):
        assert pg_options is None or pg_options.config.blocking == 1  # else connecting fails
        init_process_group("gloo", **how)

    patch(dist, "init_process_group", init_gloo)
    # Not torch's own count: whoever has it is taken for a build for CUDA.
    patch(gpu, "sees_other_gpus", lambda: False)
    for module in (gpu, machine_kind):
        patch(module, "gpu_kind", lambda device: ["fake GPU"])
    # Where torch is built for CUDA, its optimizers ask for the stream of a GPU of the machine.
    patch(torch.accelerator, "current_accelerator", lambda *_, **__: None)
    # For which `fully_shard` asks where a module of it holds others.
    patch(torch.accelerator, "current_stream", lambda *_: _Stream())
    patch(torch.nn.utils.clip_grad, "_group_tensors_by_device_and_dtype", _grouped)
    run = threading.Thread.run

    def run_with_modes(thread):
        with modes():
            run(thread)

    patch(threading.Thread, "run", run_with_modes)


@contextlib.contextmanager
def modes():
    """In a thread."""
    with _Calls(), _Operations():
        yield


class _Calls(TorchFunctionMode):
    """Calls in which a device is named."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        if name == "numpy" and on_gpu(args[0]):
            raise WrongDevice("numpy of a tensor of the GPU")
        if name in ("cpu", "cuda") and isinstance(args[0], torch.Tensor):
            return _moved(args[0], name == "cuda")
        if name == "pin_memory":
            return args[0]
        if name == "to":
            return _to(func, *args, **kwargs)
        if name == "backward":
            return self._backward(*args)
        if name == "scaled_dot_product_attention":  # makes a mask
            _inside.gpu = on_gpu(args[0])
            try:
                return func(*args, **kwargs)
            finally:
                _inside.gpu = False
        kwargs.pop("pin_memory", None)
        device = kwargs.get("device")
        if device is None:
            return func(*args, **kwargs)
        kwargs["device"] = _HOST
        return _moved(func(*args, **kwargs), torch.device(device).type == "cuda")

    def _backward(self, loss):
        """Torch leaves this mode while it handles a call, and hooks are called in this one."""
        ones = torch.ones_like(loss)
        with self:
            torch.autograd.graph._engine_run_backward(
                (loss,), (ones,), False, False, (), allow_unreachable=True, accumulate_grad=True
            )


def _to(func, source, *args, **kwargs):
    kwargs.pop("non_blocking", None)
    named = [argument for argument in args if isinstance(argument, torch.device | str)]
    device = kwargs.pop("device", named[0] if named else None)
    if device is not None:
        source = _moved(source, torch.device(device).type == "cuda")
    dtypes = [argument for argument in args if isinstance(argument, torch.dtype)]
    return func(source, *dtypes, **kwargs) if dtypes or kwargs else source


def _moved(tensor, to_gpu):
    if on_gpu(tensor) == to_gpu:
        return tensor
    return _marked(tensor.clone(), to_gpu)


def _marked(tensor, is_gpu):
    storage = tensor.untyped_storage()
    if is_gpu:
        storage.is_fake_gpu = True
    elif hasattr(storage, "is_fake_gpu"):
        del storage.is_fake_gpu
    return tensor


class _Operations(TorchDispatchMode):
    """What is computed from the GPU's tensors is the GPU's."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = _tensors((args, kwargs))
        name = func._schema.name.partition("::")[2]
        _check(name, given)
        result = func(*args, **(kwargs or {}))
        if any(map(on_gpu, given)) or (not given and getattr(_inside, "gpu", False)):
            known = {tensor.untyped_storage()._cdata for tensor in given}
            for made in _tensors(result):
                if made.untyped_storage()._cdata not in known:
                    _marked(made, True)
        return result


def _grouped(lists, with_indices=False):
    """Torch's own looks at the tensors in C++, where they are the host's."""
    groups = _foreach_utils._group_tensors_by_device_and_dtype(lists, with_indices)
    return {(given[0][0].device, dtype): (given, i) for (_, dtype), (given, i) in groups.items()}


def _tensors(tree):
    """The tensors of a tree; of one that is sharded over processes, the part of this one."""
    return [local_of(leaf) for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _check(name, given):
    places = [on_gpu(tensor) for tensor in given]
    if name in _MIXED or len(set(places)) < 2:
        return
    host = [tensor for tensor, gpu in zip(given, places, strict=True) if not gpu]
    writes_host = name.endswith("_") and not places[0]
    if writes_host or name in _STRICT or any(tensor.dim() for tensor in host):
        shapes = [(tuple(tensor.shape), str(tensor.device)) for tensor in given]
        raise WrongDevice(f"{name} over tensors of two devices: {shapes}")


class _Event:
    """Passes when it is recorded."""

    def __init__(self, **_):
        self.at = 0.0

    def record(self, stream=None):
        self.at = time.perf_counter()

    def query(self):
        return True

    def synchronize(self):
        pass

    def elapsed_time(self, other):
        return 1e3 * (other.at - self.at)


class _Stream:
    def __init__(self, device=None, priority=0):
        pass

    def record_event(self, event=None):
        event = event or _Event()
        event.record(self)
        return event

    def wait_stream(self, other):
        pass

    def wait_event(self, event):
        pass


class _Cuda:
    """What is called of torch.cuda."""

    Event, Stream = _Event, _Stream

    @staticmethod
    def is_available():
        return True

    @staticmethod
    def init():
        pass

    @staticmethod
    def set_device(device):
        pass

    @staticmethod
    def current_device():
        return 0

    @staticmethod
    def device_count():
        return 1

    @staticmethod
    def get_rng_state(device):
        return torch.get_rng_state()

    @staticmethod
    def set_rng_state(state, device):
        torch.set_rng_state(state)

    @staticmethod
    def current_stream(device=None):
        return _Stream()

    @staticmethod
    def stream(stream):
        return contextlib.nullcontext()

    @staticmethod
    def synchronize(device=None):
        pass

    @staticmethod
    def is_current_stream_capturing():
        return False

    @staticmethod
    def get_device_properties(device):
        return types.SimpleNamespace(name="fake GPU", total_memory=80 << 30, uuid="8932f937")

    @staticmethod
    def mem_get_info(device):
        return 79 << 30, 80 << 30

    @staticmethod
    def cudart():
        return types.SimpleNamespace(
            cudaHostRegister=lambda at, nbytes, flags: 0, cudaHostUnregister=lambda at: 0
        )


class _Autocast(torch.autocast):
    def __init__(self, device_type, **options):
        super().__init__("cpu", **options)


class _Options:
    def __init__(self):
        self._timeout = timedelta(minutes=10)
        self.config = types.SimpleNamespace(blocking=1)
        self.global_ranks_in_group = []


class _ProcessGroupNCCL:
    """Over Gloo. Like NCCL's, it takes contiguous tensors of the GPU, connects in the first
    collective, and reports a lost peer in the background. A collective ends before its launch
    returns."""

    Options = _Options

    def __init__(self, store, rank, world_size, options):
        self._meeting = store, rank, world_size
        self._gloo = None
        self._aborted, self._error = False, ErrorType.SUCCESS

    def abort(self):
        self._aborted = True

    def get_error(self):
        return self._error

    def allreduce(self, tensors, options=None):
        return self._do(tensors, lambda gloo: gloo.allreduce(tensors))

    def alltoall_base(self, output, input, *sizes):
        return self._do([output, input], lambda gloo: gloo.alltoall_base(output, input, *sizes))

    def _allgather_base(self, output, input, options):
        return self._do([output, input], lambda gloo: gloo._allgather_base(output, input, options))

    def _do(self, tensors, start):
        if not all(on_gpu(tensor) and tensor.is_contiguous() for tensor in tensors):
            raise WrongDevice("NCCL takes contiguous tensors of the GPU")
        try:
            work = start(self._connected())
            while not work.is_completed() and not self._aborted:
                time.sleep(0.0005)
            if not self._aborted:
                work.wait()
        except RuntimeError:
            self._error = ErrorType.COMM_ERROR
        return types.SimpleNamespace(wait=lambda: True)

    def _connected(self):
        if self._gloo is None:
            options = dist.ProcessGroupGloo._Options()
            options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
            options._timeout = timedelta(seconds=60)
            self._gloo = dist.ProcessGroupGloo(*self._meeting, options)
        return self._gloo
