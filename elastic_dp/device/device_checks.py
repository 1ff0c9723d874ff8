"""What a worker checks of its GPU before it is announced. Where a check fails the worker ends, its
loss counts against the node, and a node where that happens again is avoided.

NVML is asked where the module `pynvml` is installed, by the extra `nvml`. What it does not know of
a GPU (some have no ECC memory, parts of one have no clocks of their own) is not checked.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import socket
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from elastic_dp.device.gpu import is_gpu, settle_cublas
from elastic_dp.errors import ClusterError
from elastic_dp.threads import background

FREE = 0.8  # of the memory of a GPU that a worker has alone
ANSWER_S = 10.0  # in which NVML answers: a driver whose GPU is broken may never do
PATIENCE_S = 20.0  # in which the process that had the GPU before frees its memory
_TYPE = "ray.io/accelerator-type"  # a label of nodes
_TILES, _TILE, _DEPTH = 8, 256, 256  # of the product: each unit of a large GPU has a part in it


def admit(
    device: torch.device,
    resources: Mapping[str, float],
    labels: Mapping[str, str],
    *,
    exact: bool,
    shared: bool,
    patience_s: float = PATIENCE_S,
) -> None:
    """Checks the GPU of this worker, or of this process of it. Raises ClusterError. `resources` and
    `labels`: those of `ScalingConfig`. `shared`: other workers' processes use the GPU, too."""
    if not is_gpu(device):
        return
    _check_type(torch.cuda.get_device_properties(device).name, resources, labels)
    if exact:
        settle_cublas(device)  # before the first product
    _check_product(device)
    if not shared and resources.get("GPU", 0) >= 1:
        _check_memory(device, patience_s)
    with contextlib.suppress(ImportError):
        _check_in_time(partial(_check_nvml, importlib.import_module("pynvml"), device))


def _refuse(check: str, found: str, remedy: str) -> ClusterError:
    return ClusterError(
        f"the GPU of {socket.gethostname()} fails the check {check!r}: {found}. {remedy}"
    )


def _check_type(name: str, resources: Mapping[str, float], labels: Mapping[str, str]) -> None:
    wanted = [key.partition(":")[2] for key in resources if key.startswith("accelerator_type:")]
    wanted += [labels[_TYPE]] if re.fullmatch(r"[\w-]+", labels.get(_TYPE, "")) else []
    for kind in wanted:
        if kind.partition("-")[0].lower() not in name.lower():  # "A100-40G", "NVIDIA A100-SXM4"
            raise _refuse(
                "type",
                f"it is a {name}, and the job asks for {kind}",
                "Correct the accelerator type that its node was started with, or what the job asks "
                "for",
            )


def _check_product(device: torch.device) -> None:
    """Multiplies small whole numbers, of whose sums all are exact in each precision and order."""
    drawn = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-1, 2, (_TILE, _DEPTH), generator=drawn) for _ in range(2))
    right = (a @ b.T).to(device)
    for dtype in (torch.float32, torch.bfloat16):
        rows, columns = (x.to(device, dtype).repeat(_TILES, 1) for x in (a, b))
        product = (rows @ columns.T).view(_TILES, _TILE, _TILES, _TILE)
        wrong = int((product != right[None, :, None, :]).sum())
        if wrong:
            raise _refuse(
                "product",
                f"{wrong} of {product.numel()} elements of a matrix product in {dtype} are wrong",
                "Take the GPU out of service: what it computes cannot be relied on",
            )


def _check_memory(device: torch.device, patience_s: float) -> None:
    until = time.monotonic() + patience_s
    while True:
        free, total = torch.cuda.mem_get_info(device)
        if free >= FREE * total:
            return
        if time.monotonic() >= until:
            break
        time.sleep(0.2)
    raise _refuse(
        "memory",
        f"{free / 1e9:.1f} of {total / 1e9:.1f} GB are free, though Ray gave the GPU to this "
        "worker alone",
        "End the processes that use it (nvidia-smi lists them)",
    )


def _check_in_time(check: Callable[[], None]) -> None:
    found: list[Exception] = []
    asking = background("nvml", check, found.append)
    asking.start()
    asking.join(ANSWER_S)
    if asking.is_alive():
        raise _refuse(
            "nvml", f"NVML has not answered for {ANSWER_S:g} s", "Restart the node, or replace it"
        )
    if found:
        raise found[0]


def _check_nvml(nvml: Any, device: torch.device) -> None:
    uuid = torch.cuda.get_device_properties(device).uuid
    with contextlib.suppress(nvml.NVMLError):
        nvml.nvmlInit()
        try:
            gpu = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
            _check_ecc(nvml, gpu)
            _check_clocks(nvml, gpu)
        finally:
            nvml.nvmlShutdown()


def _known(nvml: Any, ask: Callable[..., Any], *arguments: Any, unknown: Any) -> Any:
    try:
        return ask(*arguments)
    except nvml.NVMLError:
        return unknown


def _check_ecc(nvml: Any, gpu: Any) -> None:
    of = gpu, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
    errors = _known(nvml, nvml.nvmlDeviceGetTotalEccErrors, *of, unknown=0)
    *_, failed = _known(nvml, nvml.nvmlDeviceGetRemappedRows, gpu, unknown=(0, 0, 0, 0))
    if errors or failed:
        found = f"{errors} uncorrectable errors of its memory since its driver was loaded"
        found += ", and a row could not be remapped" if failed else ""
        raise _refuse("ecc", found, "Reset the GPU (nvidia-smi --gpu-reset), or replace it")


def _check_clocks(nvml: Any, gpu: Any) -> None:
    reasons = _known(nvml, nvml.nvmlDeviceGetCurrentClocksThrottleReasons, gpu, unknown=0)
    slow = {
        "heat": nvml.nvmlClocksThrottleReasonHwThermalSlowdown,
        "its power supply": nvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown,
        "its hardware": nvml.nvmlClocksThrottleReasonHwSlowdown,
    }
    why = next((why for why, bit in slow.items() if reasons & bit), None)
    if why is not None:
        raise _refuse(
            "throttling",
            f"{why} slows its clocks down to half or less",
            "Look at the node's cooling and power",
        )
