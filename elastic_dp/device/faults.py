"""Which exceptions mean that a device, and not the user's code, has failed.

After most faults of a GPU (an Xid, an uncorrectable ECC error, a failed launch, a device-side
assert) the CUDA context of the process is lost: every later call raises, so the process can only
end. Such a worker is lost, like one that is killed. A device-side assert may be the fault of a row;
whoever runs that micro-batch dies of it, so the budget by micro-batch finds it. Running out of
device memory is a kind of its own, with a budget of its own.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from enum import StrEnum

import torch
import torch.distributed as dist

from elastic_dp.errors import GroupError


class FaultKind(StrEnum):
    DEVICE = "device fault"
    OUT_OF_MEMORY = "out of memory"


# In this order. Only a RuntimeError is looked at, which is what torch raises for all of them.
_OUT_OF_MEMORY = re.compile(
    r"(CUDA|HIP|CUDA driver) (error: )?out of memory"
    r"|_STATUS_ALLOC_FAILED|_STATUS_INTERNAL_ERROR_\w*ALLOCATION_FAILED"
    r"|Cuda failure 2\b|Failed to CUDA \w*alloc"  # in NCCL's words
)
# Another worker would raise these, too: wrong arguments, a GPU that the build does not know, and
# operations that cannot be captured in a graph.
_MISTAKE = re.compile(
    r"CUDA error: (invalid (device ordinal|argument|configuration argument|device function)"
    r"|invalid resource handle|no kernel image|named symbol not found|peer access"
    r"|API call is not supported|operation not permitted when stream is capturing"
    r"|operation failed due to a previous error during capture|operation would make)"
    r"|_STATUS_(NOT_SUPPORTED|INVALID_VALUE|BAD_PARAM|ARCH_MISMATCH|LICENSE_ERROR|INVALID_TYPE)"
)
_DEVICE = re.compile(
    r"(CUDA|HIP) (driver )?error\b|Triton Error \[(CUDA|HIP)\]"
    r"|_STATUS_(EXECUTION_FAILED|INTERNAL_ERROR|MAPPING_ERROR|NOT_INITIALIZED|SUBLIBRARY)"
    r"|CUFFT_(EXEC_FAILED|INTERNAL_ERROR|SETUP_FAILED)"
    r"|unhandled cuda error|Cuda failure|uncorrectable ECC"
)
_TEXT_LIMIT = 600
_PROBE_S = 5.0


def fault_of(error: BaseException) -> FaultKind | None:
    """What kind of fault the error is, or what it was raised from; None: it is the code's.

    An error of NCCL inside a GroupError is a peer's, unless NCCL names a failure of CUDA.
    """
    in_group = False
    found: BaseException | None = error
    while found is not None:
        in_group = in_group or isinstance(found, GroupError)
        kind = _kind_of(found, in_group=in_group)
        if kind is not None:
            return kind
        found = found.__cause__
    return None


def _kind_of(error: BaseException, *, in_group: bool) -> FaultKind | None:
    if isinstance(error, torch.OutOfMemoryError):
        return FaultKind.OUT_OF_MEMORY
    if not isinstance(error, RuntimeError):
        return None
    text = str(error)
    if _OUT_OF_MEMORY.search(text):
        return FaultKind.OUT_OF_MEMORY
    if _MISTAKE.search(text):
        return None
    if isinstance(error, torch.AcceleratorError) or _DEVICE.search(text):
        return FaultKind.DEVICE
    if isinstance(error, dist.DistBackendError) and not in_group:
        return FaultKind.DEVICE
    return None


def describe(error: BaseException) -> str:
    """In one line: torch adds advice for debugging in further ones."""
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}"[:_TEXT_LIMIT]


def broken_context(patience_s: float = _PROBE_S) -> Exception | None:
    """What the device raises since its context is lost, whatever was raised before; None: it works,
    or is busy for longer than we wait."""
    if not torch.cuda.is_initialized():
        return None
    until = time.monotonic() + patience_s
    try:
        event = torch.cuda.Event()
        event.record()
        while not event.query() and time.monotonic() < until:
            time.sleep(0.01)
    except RuntimeError as error:
        return error if fault_of(error) is FaultKind.DEVICE else None
    return None


@contextlib.contextmanager
def suppress_errors_of_code() -> Iterator[None]:
    """Suppress whatever user code raises, but for a fault of the device."""
    try:
        yield
    except Exception as error:
        if fault_of(error) is not None:
            raise
