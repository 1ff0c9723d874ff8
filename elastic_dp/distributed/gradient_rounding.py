"""The rounding of gradients in the exact sum, for `wire=`: they travel in fewer bytes, with the
same bits for any number of workers.

Each node of the reduction tree is rounded: a leaf, Q(leaf), and each sum, Q(l + r). Which nodes
travel depends on the workers, so rounding only what is sent would give other bits for each number
of them. Rounded sums are kept in the narrow dtype, so to send one rounds nothing.

Q rounds to the nearest bfloat16, ties to even. The tree has log2(V) levels, so no sum swamps small
gradients one after another: neither random rounding nor error feedback is needed. The exponent is
that of fp32, so no scale is needed either.

Gradients of 16 bits stay as they are. What else travels is not rounded: losses, weights, metrics,
buffers, and the state of a joiner.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from elastic_dp.errors import ModelError

_WIRE_DTYPES = {"bf16": torch.bfloat16}
_NARROW = (torch.bfloat16, torch.float16)


def wire_dtype(wire: str | None, dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which gradients of parameters of `dtype` are added and sent."""
    return dtype if wire is None or dtype in _NARROW else _WIRE_DTYPES[wire]


def rounded(
    gradient: torch.Tensor, wire: str | None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns Q(gradient), in `out` if that is given; the gradient itself if nothing rounds it."""
    dtype = wire_dtype(wire, gradient.dtype)
    if out is None or dtype == gradient.dtype:
        return converted(gradient, dtype)
    return out.copy_(gradient)


def converted(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns the tensor in this dtype, where it is, and itself if that is its own."""
    return tensor if tensor.dtype == dtype else torch.empty_like(tensor, dtype=dtype).copy_(tensor)


def check_wire(wire: str | None, parameters: Mapping[str, torch.nn.Parameter]) -> None:
    """Raises ModelError if a parameter's gradients cannot be rounded for `wire`."""
    for name, p in parameters.items() if wire is not None else ():
        if p.dtype not in (torch.float32, *_NARROW):
            raise ModelError(
                f"model.{name} is of {p.dtype}, and wire={wire!r} rounds gradients of "
                "torch.float32 only: leave wire out, or convert the parameter by .float()"
            )
