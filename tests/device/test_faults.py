"""Which exceptions are faults of a device: by type and message, as torch, NVIDIA's libraries and
NCCL write them."""

import pytest
import torch
import torch.distributed as dist

from elastic_dp.device import faults
from elastic_dp.device.faults import FaultKind, broken_context, describe, fault_of
from elastic_dp.errors import CollectiveFailed, LossError

ADVICE = "\nCUDA kernel errors might be asynchronously reported at some other API call"
Accelerator, Backend = torch.AcceleratorError, dist.DistBackendError
NCCL = "NCCL error in: ProcessGroupNCCL.cpp:94, "

DEVICE = {
    "assert": Accelerator("CUDA error: device-side assert triggered" + ADVICE),
    "illegal access": Accelerator("CUDA error: an illegal memory access was encountered" + ADVICE),
    "launch failure": Accelerator("CUDA error: unspecified launch failure" + ADVICE),
    "ECC": Accelerator("CUDA error: uncorrectable ECC error encountered"),
    "off the bus": Accelerator("CUDA error: unknown error"),
    "older torch": RuntimeError("CUDA error: device-side assert triggered" + ADVICE),
    "driver": RuntimeError("CUDA driver error: invalid context"),
    "Triton": RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
    "cuBLAS": RuntimeError(
        "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm( handle, ...)`"
    ),
    "cuBLAS handle": RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `x`"),
    "cuDNN": RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
    "cuDNN 9": RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED_CUDART"),
    "cuDNN inside": RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR"),
    "cuSOLVER": RuntimeError("cusolver error: CUSOLVER_STATUS_EXECUTION_FAILED, when calling `x`"),
    "cuFFT": RuntimeError("cuFFT error: CUFFT_EXEC_FAILED"),
    "NCCL": Backend(NCCL + "unhandled system error"),
    "NCCL of CUDA": Backend(NCCL + "unhandled cuda error (run with NCCL_DEBUG=INFO for details)"),
}
MEMORY = {
    "allocator": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."),
    "any words": torch.OutOfMemoryError("no more"),
    "CUDA": Accelerator("CUDA error: out of memory" + ADVICE),
    "cuBLAS": RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"),
    "cuDNN": RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    "cuDNN 9": RuntimeError("CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    "NCCL": Backend(NCCL + "unhandled cuda error\nLast error:\nFailed to CUDA calloc 8388608"),
    "NCCL's code": Backend(NCCL + "unhandled cuda error\nLast error:\nCuda failure 2 'out of me'"),
}
CODE = {
    "another type": ValueError("CUDA error: device-side assert triggered"),
    "shapes": RuntimeError("mat1 and mat2 shapes cannot be multiplied (4x16 and 8x4)"),
    "ordinal": Accelerator("CUDA error: invalid device ordinal" + ADVICE),
    "argument": Accelerator("CUDA error: invalid argument" + ADVICE),
    "old GPU": Accelerator("CUDA error: no kernel image is available for execution on the device"),
    "capture": Accelerator("CUDA error: operation not permitted when stream is capturing"),
    "cuBLAS": RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasGemmEx`"),
    "cuDNN": RuntimeError("cuDNN error: CUDNN_STATUS_BAD_PARAM"),
    "words": RuntimeError("the tracker ran out of memory"),
    "ours": LossError("the loss is NaN"),
}


ALL = {FaultKind.DEVICE: DEVICE, FaultKind.OUT_OF_MEMORY: MEMORY, None: CODE}


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, errors in ALL.items() for name in errors]
)
def test_error_is_of_its_kind(kind, name):
    assert fault_of(ALL[kind][name]) is kind


def raised_from(error, cause):
    error.__cause__ = cause
    return error


REMOTE = Backend(NCCL + "remote process exited")
WITHIN = raised_from(RuntimeError("the loss failed"), DEVICE["assert"])


@pytest.mark.parametrize(
    ("error", "cause", "kind"),
    [
        (ValueError("row 7"), WITHIN, FaultKind.DEVICE),
        # Of a peer, and of this device.
        (CollectiveFailed("peer"), REMOTE, None),
        (CollectiveFailed("peer"), RuntimeError("Connection closed"), None),
        (CollectiveFailed("it"), DEVICE["assert"], FaultKind.DEVICE),
        (CollectiveFailed("it"), DEVICE["NCCL of CUDA"], FaultKind.DEVICE),
    ],
)
def test_error_that_was_raised_from_another_one_is_of_its_kind(error, cause, kind):
    assert fault_of(raised_from(error, cause)) is kind


def test_describe_leaves_out_advice_and_is_short():
    assert (
        describe(DEVICE["assert"]) == "AcceleratorError: CUDA error: device-side assert triggered"
    )
    assert len(describe(RuntimeError("x" * 10_000))) == 600


class LostEvent:
    """An event of a device whose context is lost."""

    def record(self):
        raise DEVICE["assert"]


class BusyEvent:
    def record(self):
        pass

    def query(self):
        return False


def test_broken_context_finds_a_lost_context_whatever_was_raised_before(monkeypatch):
    assert broken_context() is None  # no device in use
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", LostEvent)
    assert broken_context() is DEVICE["assert"]


def test_broken_context_of_a_device_that_is_busy_does_not_wait_for_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", BusyEvent)
    assert broken_context(patience_s=0.02) is None


def test_suppress_errors_of_code_lets_faults_through():
    with faults.suppress_errors_of_code():
        raise KeyError("x")
    with pytest.raises(torch.OutOfMemoryError), faults.suppress_errors_of_code():
        raise MEMORY["allocator"]
