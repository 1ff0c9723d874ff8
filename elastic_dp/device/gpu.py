"""Facts and settings of a GPU, its random generators, and times that it measures."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from elastic_dp.device.attention import enabled_kernels
from elastic_dp.errors import ClusterError

VISIBLE = "CUDA_VISIBLE_DEVICES"

# Which of them a library may use for a matrix product of half precision.
_REDUCTIONS = (
    "allow_fp16_reduced_precision_reduction",
    "allow_fp16_reduced_precision_reduction_split_k",
    "allow_bf16_reduced_precision_reduction",
    "allow_bf16_reduced_precision_reduction_split_k",
    "allow_fp16_accumulation",
)
# Read by NVIDIA's libraries themselves.
_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
_VARIABLES = ("NVIDIA_TF32_OVERRIDE", _CUBLAS)

# Whether this process has used one. Not a function of its own: each micro-batch asks.
gpus_are_in_use = torch.cuda.is_initialized


def is_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


def pick_device(resources: Mapping[str, float]) -> torch.device:
    """Return the GPU if the worker, or this process of it, was given one, else the CPU.

    Raises ClusterError if torch does not see the GPU: training on the CPU instead would be a
    hundred times slower, with a backend that only moves CUDA tensors. And if the first GPU that it
    sees may be another worker's.
    """
    gpus = resources.get("GPU", 0)
    if gpus <= 0:
        return torch.device("cpu")
    gpu = first_gpu()
    if gpu is not None:
        if sees_other_gpus():
            raise ClusterError(
                "CUDA shows this process other GPUs than its own, because a module asked for them "
                "before Ray gave the process to this worker. See that no module asks when it is "
                "imported"
            )
        return gpu
    raise ClusterError(
        f"scaling.resources_per_worker asks for {gpus:g} GPU, but torch finds no CUDA device on "
        f"{socket.gethostname()}: {why_no_gpu()}. To train on the CPU, set "
        "scaling.resources_per_worker.GPU=0"
    )


def first_gpu() -> torch.device | None:
    """Returns the first GPU that this process sees, or None."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else None


def sees_other_gpus() -> bool:
    """Returns whether CUDA shows this process more GPUs than CUDA_VISIBLE_DEVICES lists: it was
    first asked for them before the variable was set, and does not look again."""
    listed = os.environ.get(VISIBLE)
    return listed is not None and torch._C._cuda_getDeviceCount() > len(listed.split(","))


def visible_to_processes(given: Sequence[str], processes: int) -> list[dict[str, str]]:
    """Returns what each process of a worker has in its environment so that CUDA shows it one of the
    GPUs that the worker was `given`, and that one only: numbers, or UUIDs of GPUs or of parts of
    them (MIG), in any order. Without any, processes train on the CPU. Raises ClusterError.

    So each process finds its own as the first GPU, whatever their numbers are on the node. NCCL
    finds those of the others by their bus addresses. CUDA shows a process one part of a GPU at
    most, so a list of several parts would hide all but the first.
    """
    if not given:
        return [{} for _ in range(processes)]
    if len(given) != processes:
        raise ClusterError(
            f"the worker has {processes} processes, and Ray gave it {len(given)} GPUs: "
            f"{', '.join(given)}"
        )
    in_order = sorted(given, key=lambda gpu: (len(gpu), gpu))  # numbers, or texts of one length
    return [{VISIBLE: gpu} for gpu in in_order]


def backends_of_mesh(device: torch.device, *, shared: bool) -> str:
    """Returns torch's words for what carries the tensors of a worker's processes. Those of the host
    travel over Gloo in any case. `shared`: all have the same GPU, for which NCCL is no way."""
    if not is_gpu(device):
        return "gloo"
    return "cpu:gloo,cuda:gloo" if shared else f"cpu:gloo,cuda:{nccl_backend()}"


def nccl_backend() -> str:
    """Returns torch's name of the backend that `dist.ProcessGroupNCCL` and its options are of. From
    torch 2.15 on "nccl" means another one, nccl2, which has options of its own."""
    return "nccl-legacy" if _torch_is_at_least(2, 15) else "nccl"


def _torch_is_at_least(major: int, minor: int) -> bool:
    first, second, *_ = torch.__version__.split(".")
    return (int(first), int(second)) >= (major, minor)


def why_no_gpu() -> str:
    if not torch.version.cuda:
        return f"torch {torch.__version__} was built without CUDA; install a build with it"
    return (
        f"torch {torch.__version__} was built for CUDA {torch.version.cuda}; see that the "
        "driver is new enough for it "
        "and that the container sees its libraries (on GKE LD_LIBRARY_PATH must hold "
        "/usr/local/nvidia/lib64)"
    )


def gpu_kind(device: torch.device) -> list[str]:
    """Returns the model of the GPU, and what decides by which kernels, and with which precision
    inside, it computes.

    Not `allow_tf32`: torch raises where it was set by `fp32_precision`, which knows both.
    """
    p = torch.cuda.get_device_properties(device)
    backend, cudnn = torch.backends.cuda, torch.backends.cudnn
    conv, rnn = cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision  # type: ignore[attr-defined]
    reductions = [str(getattr(backend.matmul, name, None)) for name in _REDUCTIONS]
    attention = "+".join(enabled_kernels())
    return [
        f"{p.name}, {p.multi_processor_count} SMs, capability {p.major}.{p.minor}",
        f"cuda {torch.version.cuda}, cudnn {torch.backends.cudnn.version()}",
        f"fp32 {backend.matmul.fp32_precision}/{conv}/{rnn}",
        f"reductions {'/'.join(reductions)}",
        f"attention {attention} {backend.fp16_bf16_reduction_math_sdp_allowed()}",
        f"blas {backend.preferred_blas_library()}, linalg {backend.preferred_linalg_library()}",
        f"cudnn enabled {cudnn.enabled}",
        *(f"{name} {os.environ[name]}" for name in _VARIABLES if name in os.environ),
    ]


def nccl_version() -> str:
    return ".".join(map(str, torch.cuda.nccl.version()))


def chooses_kernels_by_time(device: torch.device) -> bool:
    """Returns whether cuDNN tries its kernels and takes the fastest, which differs each time."""
    return is_gpu(device) and torch.backends.cudnn.benchmark


# ----------------------------------------------------------------------------------------- cuBLAS


def settle_cublas(device: torch.device) -> None:
    """Makes matrix products of this process deterministic, in torch's eyes, too. Called before the
    first product on the GPU. A value of the variable that the user has set stays.

    torch demands `CUBLAS_WORKSPACE_CONFIG`, and looks for it once, at the first product
    (`Context::alertCuBLASConfigNotDeterministic`). It gives cuBLAS a workspace for each handle and
    stream itself, so the products are deterministic with or without the variable. Up to 2.12 torch
    parses it again in each product, by a regular expression (46 us, up to five times in one), so
    there it is set for one product only.
    """
    if not is_gpu(device) or _CUBLAS in os.environ:
        return
    os.environ[_CUBLAS] = ":4096:8"
    if not _reads_cublas_config_once():
        _multiply(device)
        del os.environ[_CUBLAS]


def keep_cublas_config(model: torch.nn.Module, device: torch.device) -> None:
    """Sets the variable for good where the model has recurrent layers, which need it: cuDNN makes
    handles of its own for them. The workspaces that torch has made are dropped, since they may be
    smaller than those of the variable."""
    recurrent = any(isinstance(module, torch.nn.RNNBase) for module in model.modules())
    if is_gpu(device) and recurrent and _CUBLAS not in os.environ:
        torch.cuda.synchronize(device)
        torch._C._cuda_clearCublasWorkspaces()
        os.environ[_CUBLAS] = ":4096:8"


def _reads_cublas_config_once() -> bool:
    return _torch_is_at_least(2, 13)


def _multiply(device: torch.device) -> None:
    """Multiplies matrices, and a matrix and a vector: where cuBLASLt is preferred, torch looks for
    the variable in the second product only."""
    ones = torch.ones(2, 2, device=device)
    torch.mm(ones, ones)
    torch.mv(ones, ones[0])
    torch.cuda.synchronize(device)


# ------------------------------------------------------------------------------ random generators


def open_gpu_generators(device: torch.device) -> None:
    if is_gpu(device):
        torch.cuda.init()


def seed_gpus(seed: int) -> None:
    """Seeds the generators of all GPUs, which are in use."""
    torch.cuda.manual_seed_all(seed)


# ------------------------------------------------------------------------------------------ times


def instant() -> Any:
    """Returns an event in the current stream, which measures time."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(begins: Sequence[Any], ends: Sequence[Any]) -> float:
    """Returns the sum over pairs of instants that the GPU has passed."""
    return sum(begin.elapsed_time(end) for begin, end in zip(begins, ends, strict=True)) / 1e3
