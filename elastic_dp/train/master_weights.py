"""An optimizer that keeps parameters of 16 bits in fp32, too, and updates those."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from elastic_dp.device.accelerator import accelerator_of
from elastic_dp.errors import SpecError
from elastic_dp.train.exactness.torch_optimizers import BY_PARAMETER

_NARROW = (torch.bfloat16, torch.float16)
# Of fp32 gradients that exist at a time, or one parameter's. A device is given its work in few
# large pieces.
_TOGETHER_BYTES, _TOGETHER_BYTES_ON_DEVICE = 4 << 20, 64 << 20


class MasterWeights(torch.optim.Optimizer):
    """Updates an fp32 copy of each parameter in bfloat16 or float16, its master, with an optimizer
    of `torch.optim`. The parameter is the master, rounded.

    `MasterWeights(model.parameters(), torch.optim.AdamW, lr=3e-4)`

    - `params` and `options`: those of `optimizer_class`, whose groups and defaults this has.
    - `optimizer_class`: a class of `torch.optim`. All of its state is in fp32.

    Parameters in fp32 are updated without a copy. The state of a parameter has the key "master" in
    addition to those of the class. Raises SpecError for other classes.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: type[torch.optim.Optimizer],
        **options: Any,
    ) -> None:
        if not isinstance(optimizer_class, type) or optimizer_class not in BY_PARAMETER:
            names = ", ".join(sorted(one.__name__ for one in BY_PARAMETER))
            raise SpecError(
                f"optimizer_class is {optimizer_class!r}, must be one of torch.optim: {names}"
            )
        made: Any = optimizer_class(params, **options)
        self.optimizer_class = optimizer_class
        super().__init__(made.param_groups, made.defaults)

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles. Torch's own method leaves out attributes of subclasses."""
        return super().__getstate__() | {"optimizer_class": self.optimizer_class}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates the masters, and rounds them."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for some in self._in_parts([p for p in group["params"] if p.grad is not None]):
                self._update(group, some)
        self._updated()
        return loss

    def _updated(self) -> None:
        """Is called at the end of `step`. Subclasses do not override that: torch would run its
        hooks once for each class whose `step` a process has used."""

    def _has_master(self, p: torch.Tensor) -> bool:
        """Returns whether the state of a parameter has a master."""
        return p.dtype in _NARROW

    def _update(self, group: dict[str, Any], parameters: Sequence[torch.Tensor]) -> None:
        masters, states = list[torch.Tensor](), {}
        for p in parameters:
            state, master = dict(self.state[p]), p
            if self._has_master(p):
                dtype = master_dtype(p)
                master = state.pop("master", None)
                if master is None:
                    master = p.detach().to(dtype, copy=True)
                assert p.grad is not None
                master.grad = p.grad.to(dtype)
            masters.append(master)
            states[master] = state
        options = {key: value for key, value in group.items() if key != "param_names"}
        inner: Any = self.optimizer_class([options | {"params": masters}])  # type: ignore[call-arg]
        inner.state.update(states)
        inner.step()
        for p, master in zip(parameters, masters, strict=True):
            self.state[p] = inner.state[master]
            if master is not p:
                self.state[p] = {"master": master, **inner.state[master]}
                master.grad = None
                p.copy_(master)

    def _in_parts(self, parameters: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
        part, size = list[torch.Tensor](), 0
        for p in parameters:
            part.append(p)
            size += 4 * p.numel() if self._has_master(p) else 0
            on_device = accelerator_of(p.device).asynchronous
            if size >= (_TOGETHER_BYTES_ON_DEVICE if on_device else _TOGETHER_BYTES):
                yield part
                part, size = [], 0
        if part:
            yield part

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state. Torch's own method would give masters the dtype of the parameters."""
        super().load_state_dict(state_dict)
        numbers = [n for group in state_dict["param_groups"] for n in group["params"]]
        parameters = [p for group in self.param_groups for p in group["params"]]
        for number, p in zip(numbers, parameters, strict=True):
            for key, value in state_dict["state"].get(number, {}).items():
                mine = self.state[p][key]
                if isinstance(value, torch.Tensor) and value.dtype != mine.dtype:
                    self.state[p][key] = value.to(mine.device, copy=True)


def state_kind(optimizer: torch.optim.Optimizer, p: torch.Tensor) -> tuple[int, torch.dtype]:
    """Returns how many tensors like `p` an Adam has for it, and their dtype."""
    has_master = isinstance(optimizer, MasterWeights) and optimizer._has_master(p)
    return (3, master_dtype(p)) if has_master else (2, p.dtype)


def master_dtype(p: torch.Tensor) -> torch.dtype:
    """Returns the dtype of the master of a parameter."""
    return torch.float32 if p.dtype in _NARROW else p.dtype


def class_of(optimizer: torch.optim.Optimizer) -> type[torch.optim.Optimizer]:
    """Returns the class whose updates an optimizer makes: its own, unless it keeps masters."""
    return optimizer.optimizer_class if type(optimizer) is MasterWeights else type(optimizer)


def may_write_to_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether `step` of an optimizer may write to the gradients it is given. Of those of
    `torch.optim` only SGD with Nesterov momentum does, where it updates many tensors together, as
    it does on devices unless it is told otherwise."""
    kind = class_of(optimizer)
    if not kind.__module__.startswith("torch.optim"):
        return True
    return kind is torch.optim.SGD and any(
        group.get("nesterov")
        and (group.get("foreach") or any(p.device.type != "cpu" for p in group["params"]))
        for group in optimizer.param_groups
    )
