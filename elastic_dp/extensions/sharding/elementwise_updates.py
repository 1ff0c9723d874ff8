"""Which parameters an optimizer may update in pieces, with the bits of an update of the whole.

An elementwise optimizer computes each element of a parameter from that element's gradient and state
alone. Even so, its kernel may round the last elements of a tensor in another way than those before,
and then an update of a piece differs. Whether it does depends on the optimizer's implementation
(for-loop, foreach, fused), its options, the dtype and the device. So it is tried out, and where a
bit differs the parameter stays whole. An optimizer that is not known to be elementwise (Muon,
Adafactor, LBFGS, a subclass, one of another package) keeps all parameters whole.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from elastic_dp.distributed.gradient_units import CUT_ELEMENTS, elements_per_unit
from elastic_dp.train.exactness.torch_optimizers import ELEMENTWISE
from elastic_dp.train.master_weights import MasterWeights, class_of
from elastic_dp.train.state.tensor_digests import same_bits

_STEPS = 3  # the first makes the state, and RAdam is rectified later only in its scalars


def parameters_to_keep_whole(
    optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]
) -> set[int]:
    """Returns the numbers of the parameters that must not be updated in pieces. It tries each
    combination of options, dtype and device once, on tensors of its own. It changes neither the
    optimizer nor the global random state. Parameters that the optimizer does not have are not
    returned."""
    numbers = {id(p): number for number, p in enumerate(parameters)}
    whole: set[int] = set()
    for group in optimizer.param_groups:
        equal: dict[tuple[torch.dtype, torch.device], bool] = {}
        for p in group["params"]:
            kind = (p.dtype, p.device)
            if kind not in equal:
                equal[kind] = updates_equal_in_pieces(
                    class_of(optimizer),
                    group,
                    *kind,
                    has_masters=isinstance(optimizer, MasterWeights),
                )
            if not equal[kind]:
                whole.add(numbers[id(p)])
    return whole


def updates_equal_in_pieces(
    kind: type[torch.optim.Optimizer],
    options: dict[str, Any],
    dtype: torch.dtype,
    device: torch.device,
    *,
    has_masters: bool = False,
) -> bool:
    """Returns whether `kind`, if it is in `ELEMENTWISE`, updates units to the bits of an update of
    the whole parameter. `options` are those of a parameter group. `has_masters`: within
    `MasterWeights`. The tensors have the length of real units, since kernels treat long tensors
    otherwise (threads, chunks), and a few short ones."""
    if kind not in ELEMENTWISE or options.get("differentiable"):
        return False
    taken = inspect.signature(kind).parameters
    options = {key: value for key, value in options.items() if key in taken and key != "params"}
    make_optimizer = partial(MasterWeights, optimizer_class=kind) if has_masters else kind
    unit = elements_per_unit(dtype)
    make = torch.Generator().manual_seed(0)
    for cuts in (
        [0, unit, 2 * unit, 2 * unit + 1027],
        [0, CUT_ELEMENTS, 4 * CUT_ELEMENTS, 5 * CUT_ELEMENTS + 33],
        [0, CUT_ELEMENTS, CUT_ELEMENTS + 1],
    ):
        draws = [torch.randn(cuts[-1], generator=make).to(device, dtype) for _ in range(_STEPS + 1)]
        whole = _updated(make_optimizer, options, draws)
        for first, last in itertools.pairwise(cuts):
            piece = _updated(make_optimizer, options, [draw[first:last].clone() for draw in draws])
            if not all(same_bits(a[first:last], b) for a, b in zip(whole, piece, strict=True)):
                return False
    return True


def _updated(
    make: Callable[..., Any], options: dict[str, Any], draws: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Returns the parameter and its state of equal shape, after a step for each draw but the
    first, which are the initial values."""
    parameter = torch.nn.Parameter(draws[0].clone())
    optimizer = make([parameter], **options)
    for draw in draws[1:]:
        parameter.grad = draw
        optimizer.step()
    state = optimizer.state[parameter]
    of_elements = [x for _, x in sorted(state.items()) if isinstance(x, torch.Tensor) and x.dim()]
    return [parameter.detach(), *of_elements]
