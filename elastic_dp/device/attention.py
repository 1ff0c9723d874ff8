"""The kernels of `scaled_dot_product_attention` in an exact run on a GPU."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

_KERNELS = ("flash", "mem_efficient", "math", "cudnn")
EXACT_ATTENTION = (
    "exact=True: flash and memory-efficient attention have deterministic backward passes, which "
    "are slower, and cuDNN's attention is not used. To use it, and lose exactness, call the model "
    "under torch.nn.attention.sdpa_kernel in the loss function"
)
# Flash and memory-efficient attention call them, also in compiled models.
_BACKWARD = ("_flash_attention_backward", "_efficient_attention_backward")
_LOCK = threading.RLock()
_STRICT, _WARNS = "error", 1  # modes, as torch names and numbers them
_CHOSEN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@contextlib.contextmanager
def exact_attention(device: torch.device) -> Iterator[None]:
    """A context in which the backward passes of flash and memory-efficient attention are
    deterministic. cuDNN's attention is not used, unless the user has chosen kernels.

    torch has these passes only for programs in which each operator without a deterministic kernel
    is an error (`attention_backward.cu`). Here their operators run as if this were such a program.
    So does an operator that another thread calls at the same moment.
    """
    if device.type != "cuda":
        yield
        return
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings(action="ignore"):  # torch tells of a run around this one
        for name in _BACKWARD:
            strict = partial(_strictly, getattr(torch.ops.aten, name).default)
            # Asked before the kernels of devices, among them those of FlashAttention 3 and 4.
            library.impl(name, strict, "BackendSelect", with_keyset=True, allow_override=True)
    chosen = len(enabled_kernels()) < len(_KERNELS)
    with nullcontext() if chosen else sdpa_kernel(_CHOSEN):
        try:
            yield
        finally:
            del library  # which takes the kernels away


def _strictly(operator: Any, keys: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls the operator in torch's strict mode. As a call of torch's own, it does not hold the
    interpreter's lock: it may wait for a device that waits for a worker that is lost."""
    below = keys - torch._C.DispatchKeySet(torch._C.DispatchKey.BackendSelect)
    with _LOCK:
        if torch.get_deterministic_debug_mode() != _WARNS:  # the user has set another
            return operator.redispatch(below, *args, **kwargs)
        torch.set_deterministic_debug_mode(_STRICT)
        try:
            return operator.redispatch(below, *args, **kwargs)
        finally:
            torch.set_deterministic_debug_mode(_WARNS)


def is_exact_attention(device: torch.device) -> bool:
    """Returns whether `exact_attention` has chosen the kernels."""
    return device.type == "cuda" and enabled_kernels() == ["flash", "mem_efficient", "math"]


def enabled_kernels() -> list[str]:
    enabled = torch.backends.cuda
    return [name for name in _KERNELS if getattr(enabled, f"{name}_sdp_enabled")()]
