"""All checks of one loop body, from its start to its end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from elastic_dp.errors import LoopError
from elastic_dp.train.loop_guard.body_variables import BodyVariables
from elastic_dp.train.state.module_buffers import ModuleBuffers
from elastic_dp.train.state.train_state import TrainState
from elastic_dp.train.state.unread_buffers import changed_by_body


class LoopGuard:
    """Checks each loop body for changes that a worker that joins would miss."""

    def __init__(self, state: TrainState, buffers: ModuleBuffers, loss_fn: Any) -> None:
        self._state, self._buffers = state, buffers
        passed = [state.scheduler, *state.user.values()]
        self._variables = BodyVariables(state.model, state.optimizers.all, loss_fn, passed)

    def body_begins(self) -> None:
        self._state.loop_body_guard.begin()
        self._variables.begin()

    def body_ended(self, warn: Callable[[str], None]) -> None:
        """Checks the body that has ended. Passes warnings to `warn`. Raises LoopError."""
        self._state.loop_body_guard.check()
        for warning in [*self._state.loop_body_guard.attributes_set(), *self._variables.check()]:
            warn(warning)
        written = self._buffers.written_outside()
        if written is not None:
            raise LoopError(changed_by_body(written))
        self._buffers.take_extra_state()
