"""Detects a loop body that changes parameters, the optimizer's parameter groups or its state, and a
loss function that steps an optimizer.

Each member runs each body once, on the state that the step computed or that it took over from
another member. If a body wrote to that state, some members would apply the change twice.

- `optimizer.step()` raises at once, by a pre-step hook.
- A parameter, buffer or module that is added to the model or replaced raises at once, also in
  forward, by torch's registration hooks.
- Writes to parameters show in their versions and addresses. Around the first body of a process all
  values are compared, too, since `p.data.mul_(…)` raises no version, and so are the optimizer's
  state and the modules.
- In the first body of a process the gradients of parameters are not None, but raise when they are
  used, as by `clip_grad_norm_`.
- `clip_grad_norm_` and `clip_grad_value_` of no gradients raise in any body and in the loss
  function: they would clip nothing, and return 0.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from itertools import cycle
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_modules
from torch.nn.utils import clip_grad

from elastic_dp.distributed.local_shards import is_sharded, local_of
from elastic_dp.errors import LoopError, LossError
from elastic_dp.train.state.tensor_digests import digest_of

_version = attrgetter("_version")
_THREAD = threading.local()  # the guard of its loop, if it runs one


class ModelGuard:
    """Watches one model and its optimizer, from `begin` to `check` of each body."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._names = [name for name, _ in model.named_parameters()]
        self._parameters = list(model.parameters())
        self._sharded = any(map(is_sharded, self._parameters))
        self._optimizer = optimizer
        self._groups = _groups(optimizer)
        self._watching = self.is_in_loss = self._had_body = False
        self._versions: list[int] = []
        self._of_leaves: list[int] | None = None  # as the first loss function found them
        self._gone: list[tuple[str, nn.Parameter]] = []  # those whose gradients are not None
        self.dropped: str | None = None  # one of them that the last body has set to None
        self._first: Any = None  # what is compared around the first body
        self._model = model
        self._modules = {module: name for name, module in model.named_modules()}
        _THREAD.guard = self
        self._hooks = [
            optimizer.register_step_pre_hook(self._steps),
            optimizer.register_load_state_dict_pre_hook(self._loads),
        ]
        self._hooks += [
            torch_modules.register_module_parameter_registration_hook(self._registers("parameter")),
            torch_modules.register_module_module_registration_hook(self._registers("module")),
            torch_modules.register_module_buffer_registration_hook(self._registers("buffer")),
        ]

    def close(self) -> None:
        """Removes the hooks: the loop has ended."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def begin(self) -> None:
        """Records the state at the start of a body."""
        self._versions = self._present_versions()
        self._size = len(self._optimizer.state)
        self._watching = True
        if self._had_body:
            return
        self._had_body, self._first = True, self._all_values()
        named = zip(self._names, self._parameters, strict=True)
        for name, p in () if self._sharded else named:
            if type(p) is nn.Parameter and p.grad is None and p.layout is torch.strided:
                p.grad = _GoneGradient.of(p)
                self._gone.append((name, p))

    def check(self) -> None:
        """Checks the state at the end of the body. Raises LoopError."""
        if not self._watching:
            return
        self._watching = False
        self.dropped = self._dropped_gradient()
        for _, p in self._gone:
            if type(p.grad) is _GoneGradient:
                p.grad = None
        self._gone = []
        if _groups(self._optimizer) != self._groups:
            raise LoopError(
                "the body of the loop over ctx.steps changed which parameters the optimizer "
                "has, e.g. by add_param_group: a worker that joins would not know. Make all "
                "groups before the loop, and in the body set their lr, or requires_grad of their "
                "parameters"
            )
        if written := self._written(self._versions, self._present_versions()):
            raise _body_wrote(repr(written))
        before, self._first = self._first, None
        if before is not None and (changes := before.items() - self._all_values().items()):
            raise _body_wrote(min(changes)[0])
        if len(self._optimizer.state) < self._size:
            raise _body_wrote("the optimizer's state")

    def leaves_begin(self) -> None:
        """Forgets the parameters' versions."""
        self._of_leaves = None

    @contextlib.contextmanager
    def loss_runs(self) -> Iterator[None]:
        """A context for a loss function. It records the parameters' versions if it is the first."""
        if self._of_leaves is None:
            self._of_leaves = self._parameter_versions()
        self.is_in_loss = True
        try:
            yield
        finally:
            self.is_in_loss = False

    def written_by_losses(self) -> str | None:
        """Returns a parameter that loss functions wrote to, or None. Forgets the versions."""
        before, self._of_leaves = self._of_leaves, None
        return self._written(before, self._parameter_versions()) if before else None

    def watch_others(self, optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
        """Refuses steps of other optimizers, by the names of the loss function's variables."""
        for name, optimizer in optimizers.items():

            def refuse(*_: Any, name: str = name) -> None:
                if self.is_in_loss:
                    raise LossError(
                        f"the loss function called {name}.step(), of a second optimizer: it may "
                        "run more than once for a step, and each worker runs it for its own "
                        'micro-batches. Train both as one: model = nn.ModuleDict({"G": G, '
                        '"D": D}), one optimizer with a parameter group for each, and one loss '
                        "that adds both, each with the other's parameters detached (docs/loop.md)"
                    )

            self._hooks.append(optimizer.register_step_pre_hook(refuse))

    def clips_nothing(self) -> None:
        """Raises an error if torch was called to clip no gradients, where there are none."""
        if self.is_in_loss:
            raise LossError(
                "the loss function clips gradients and finds none: the backward pass comes after "
                "it. Write ctx.steps(…, clip_norm=1.0) or clip_value="
            )
        if self._watching and self._hooks:
            raise _GoneGradient.error()

    # ------------------------------------------------------------------------------ private

    def _written(self, before: list[int], now: list[int]) -> str | None:
        """Returns a parameter with another version or address than before, or None."""
        if now == before:
            return None
        return next(n for n, a, b in zip(cycle(self._names), before, now) if a != b)

    def _dropped_gradient(self) -> str | None:
        """Returns a parameter whose gradient the body has set to None, where another one of its
        group has it still: so this was no `zero_grad`."""
        names = {id(p): name for name, p in self._gone if p.requires_grad}
        for group in self._optimizer.param_groups if names else ():
            here = [p for p in group["params"] if id(p) in names]
            gone = [names[id(p)] for p in here if p.grad is None]
            if 0 < len(gone) < len(here):
                return gone[0]
        return None

    def _all_values(self) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for name, p in zip(self._names, self._parameters, strict=True):
            if p.device.type == "cpu":  # else the host would wait for the device
                values[repr(name)] = digest_of([p])
            values[f"the optimizer's state of {name!r}"] = tuple(
                (key, id(value), value._version if isinstance(value, torch.Tensor) else 0)
                for key, value in self._optimizer.state.get(p, {}).items()
            )
        for name, module in self._model.named_modules():
            values[f"the model, of which it removed model.{name}"] = id(module)
        return values

    def _steps(self, *_: Any) -> None:
        if self.is_in_loss:
            raise LossError(
                "the loss function called optimizer.step(): return the loss, and the optimizer "
                "makes one step for the whole global batch"
            )
        if self._watching:
            raise LoopError(
                "the body of the loop over ctx.steps called optimizer.step(): when a body begins, "
                "the step has been made, and its gradients are gone. Leave out backward(), "
                "step() and zero_grad()"
            )

    def _loads(self, *_: Any) -> None:
        if self._watching:
            raise _body_wrote("the optimizer's state")

    def _registers(self, kind: str) -> Callable[..., None]:
        def check(module: nn.Module, name: str, value: Any) -> None:
            if module not in self._modules:
                return
            held = getattr(module, f"_{kind}s").get(name)
            if held is value or (kind == "buffer" and held is not None and value is not None):
                return
            path = f"{self._modules[module]}.{name}".lstrip(".")
            if held is None:
                raise LoopError(
                    f"model.{path} was added to the model since the loop over ctx.steps began: a "
                    "worker that joins would not know, and what a forward pass derives from its "
                    "rows differs between workers. Create all parameters, buffers and modules "
                    "before the loop; a cache may be a plain attribute"
                )
            raise LoopError(
                f"model.{path} was replaced by another {kind} since the loop over ctx.steps "
                "began: the optimizer and the workers that join have the one before. Make the "
                "model before the loop, and change its parameters by the optimizer"
            )

        return check

    def _present_versions(self) -> list[int]:
        """Returns the parameters' versions and addresses. `p.data = …` changes the latter."""
        held = map(local_of, self._parameters) if self._sharded else self._parameters
        places = map(torch.Tensor.data_ptr, held)
        return [*self._parameter_versions(), *places]

    def _parameter_versions(self) -> list[int]:
        return list(map(_version, self._parameters))


def _is_empty(tensors: Any) -> bool:
    return type(tensors) is list and (not tensors or (type(tensors[0]) is list and not tensors[0]))


def _watched(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_empty(tensors) and hasattr(_THREAD, "guard"):
            _THREAD.guard.clips_nothing()
        return function(tensors, *args, **kwargs)

    return call


# What torch's functions for clipping pass their gradients to: others may have imported those.
for _name in ("_get_total_norm", "_group_tensors_by_device_and_dtype"):
    setattr(clip_grad, _name, _watched(getattr(clip_grad, _name)))


class _GoneGradient(torch.Tensor):
    """Takes the place of a gradient that is gone. Raises LoopError when it is used."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def of(cls, p: torch.Tensor) -> _GoneGradient:
        one = p.detach().new_empty(())  # of which all elements are views: it takes no memory
        return one.expand(p.shape).as_subclass(cls)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func._schema.name in _OF_ZERO_GRAD:
            return args[0]
        raise cls.error()

    @staticmethod
    def error() -> Exception:
        return LoopError(
            "the body of the loop over ctx.steps uses p.grad, as clip_grad_norm_, "
            "clip_grad_value_ and backward() do: when a body begins, the step has been made, and "
            "its gradients are gone. To clip them, write ctx.steps(…, clip_norm=1.0) or "
            "clip_value=; to log their norm, step.grad_norm; to run a backward pass of your own, "
            "torch.autograd.grad"
        )


_OF_ZERO_GRAD = {"aten::zero_", "aten::_foreach_zero_", "aten::detach_"}


def _groups(optimizer: torch.optim.Optimizer) -> list[list[int]]:
    return [[id(p) for p in group["params"]] for group in optimizer.param_groups]


def _body_wrote(what: str) -> LoopError:
    return LoopError(
        f"the body of the loop over ctx.steps wrote to {what}. Parameters, buffers and the "
        "optimizer's state may change only inside the step: clamp weights in "
        "optimizer.register_step_post_hook(…); keep an average of them in a model of "
        "its own and pass it as state=, or evaluate another model with ctx.evaluate(…, model=…)"
    )
