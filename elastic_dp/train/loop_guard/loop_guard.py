"""All checks of one loop body, from its start to its end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from elastic_dp.errors import LoopError
from elastic_dp.train.loop_guard.body_variables import BodyVariables
from elastic_dp.train.state.module_buffers import ModuleBuffers, changed_by_body
from elastic_dp.train.state.train_state import TrainState


class LoopGuard:
    """Checks each loop body for changes that a worker that joins would miss."""

    def __init__(
        self, state: TrainState, buffers: ModuleBuffers, loss_fn: Any, inner_optimizer: Any = None
    ) -> None:
        self._buffers, self._body = buffers, state.loop_body_guard
        optimizers, scheduler = state.optimizers.all, state.scheduler
        delays = state.previous is not None
        self._variables = BodyVariables(
            state.model,
            optimizers,
            loss_fn,
            scheduler,
            state.user,
            modules=buffers.attributes,
            delays=delays,
        )
        if delays:
            changing = {f"state[{key!r}]": value for key, value in state.user.items()}
            changing |= {f"optimizer {number}": one for number, one in enumerate(optimizers)}
            changing["scheduler="] = scheduler
            for function in (loss_fn, inner_optimizer):
                self._variables.check_delayed(function, changing)
        self._body.watch_others(self._variables.other_optimizers())

    def loss_tried(self) -> None:
        """Checks what the loss function used when it was tried. Raises LossError."""
        self._variables.check_loss()

    def body_begins(self, step: int) -> None:
        self._body.begin(step)
        self._variables.begin()

    def body_ended(self, warn: Callable[[str], None]) -> None:
        """Checks the body that has ended. Passes warnings to `warn`. Raises LoopError."""
        self._body.check()
        for warning in self._variables.check():
            warn(warning)
        written = self._buffers.written_outside()
        if written is not None:
            raise LoopError(changed_by_body(written))

    def close(self) -> None:
        self._body.close()
