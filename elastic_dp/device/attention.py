"""The kernels of `scaled_dot_product_attention` in an exact run on a GPU."""

from __future__ import annotations

import contextlib
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
# By dispatch key. Flash and memory-efficient attention call them, also in compiled models.
_BACKWARD = {"CUDA": ("_flash_attention_backward", "_efficient_attention_backward")}
_CHOSEN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@contextlib.contextmanager
def exact_attention(device: torch.device) -> Iterator[None]:
    """A context in which the backward passes of flash and memory-efficient attention are
    deterministic. cuDNN's attention is not used, unless the user has chosen kernels.

    torch has these passes only for programs in which each operator without a deterministic kernel
    is an error (`attention_backward.cu`). Here their operators run as if this were such a program,
    and all others as before.
    """
    if device.type != "cuda":
        yield
        return
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*may also be overridden")
        for key, name in ((key, name) for key, names in _BACKWARD.items() for name in names):
            kernel = torch.library.get_kernel(f"aten::{name}", key)
            strict = partial(_strictly, kernel)
            library.impl(name, strict, key, with_keyset=True, allow_override=True)
    chosen = len(enabled_kernels()) < len(_KERNELS)
    with nullcontext() if chosen else sdpa_kernel(_CHOSEN):
        try:
            yield
        finally:
            del library  # which takes the kernels away


def _strictly(kernel: Any, keys: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls the kernel in a program that is strict meanwhile. It holds the interpreter's lock, so
    no other thread calls an operator then."""
    if not torch.is_deterministic_algorithms_warn_only_enabled():
        return kernel.call_boxed(keys, *args, **kwargs)
    torch.use_deterministic_algorithms(True)
    try:
        return kernel.call_boxed(keys, *args, **kwargs)
    finally:
        torch.use_deterministic_algorithms(True, warn_only=True)


def is_exact_attention(device: torch.device) -> bool:
    """Returns whether `exact_attention` has chosen the kernels."""
    return device.type == "cuda" and enabled_kernels() == ["flash", "mem_efficient", "math"]


def enabled_kernels() -> list[str]:
    enabled = torch.backends.cuda
    return [name for name in _KERNELS if getattr(enabled, f"{name}_sdp_enabled")()]
