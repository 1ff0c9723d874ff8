"""What a script sets in torch at its top level. `fit` and `start` record it with the job, and each
process of a worker applies it before it runs code of the user: so it computes the bits that the
script itself would.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from functools import partial
from operator import attrgetter
from typing import Any

import torch

from elastic_dp.errors import SpecError

DTYPE = "default_dtype"
# One setting may decide several values. torch refuses to read the older names of the precision of
# float32, which come first, where the newer ones were set, and the other way round once both were.
_ATTRIBUTES = (
    *("cuda.matmul.allow_tf32", "cudnn.allow_tf32"),
    *("cuda.matmul.fp32_precision", "cudnn.conv.fp32_precision", "cudnn.rnn.fp32_precision"),
    *(f"mkldnn.{kind}.fp32_precision" for kind in ("matmul", "conv", "rnn")),
    "cuda.matmul.allow_fp16_reduced_precision_reduction",
    "cuda.matmul.allow_bf16_reduced_precision_reduction",
    "cuda.matmul.allow_fp16_accumulation",
    *("cudnn.benchmark", "cudnn.deterministic", "cudnn.enabled"),
)


def _set(name: str, value: Any) -> None:
    holder, _, attribute = name.rpartition(".")
    setattr(attrgetter(holder)(torch.backends), attribute, value)


# name -> (get, set), in the order in which they are set
_SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    DTYPE: (
        lambda: str(torch.get_default_dtype()).removeprefix("torch."),
        lambda name: torch.set_default_dtype(getattr(torch, name)),
    ),
    "float32_matmul_precision": (
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
    ),
    **{
        name: (partial(attrgetter(name), torch.backends), partial(_set, name))
        for name in _ATTRIBUTES
    },
    **{
        f"cuda.enable_{kind}_sdp": (
            getattr(torch.backends.cuda, f"{kind}_sdp_enabled"),
            getattr(torch.backends.cuda, f"enable_{kind}_sdp"),
        )
        for kind in ("flash", "mem_efficient", "math", "cudnn")
    },
}


def settings_of_script() -> dict[str, bool | str]:
    """Returns the settings that the workers of a job get. Raises SpecError for a default device."""
    if (device := torch.get_default_device()).type != "cpu":
        raise SpecError(
            f"torch's default device is {str(device)!r}, and each worker has a device of its own, "
            "ctx.device: leave out torch.set_default_device, and move the model there with "
            ".to(ctx.device)"
        )
    return torch_settings()


def apply_torch_settings(settings: Mapping[str, bool | str]) -> None:
    """Sets what differs from `settings`, which `torch_settings` has returned in another process."""
    for name, value in settings.items():
        if torch_settings().get(name) != value:
            _SETTINGS[name][1](value)


def torch_settings() -> dict[str, bool | str]:
    """Returns the present settings of this process."""
    found: dict[str, bool | str] = {}
    for name, (get, _) in _SETTINGS.items():
        with contextlib.suppress(
            RuntimeError, AttributeError
        ):  # not readable, or not in this torch
            found[name] = get()
    return found
