"""What the train function has done so far with its `TrainContext`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class UserLoop:
    opened: bool = False  # ctx.steps was called with valid arguments
    in_body: bool = False  # between two steps
    exhausted: bool = False  # the loop received the end of the steps
    failure: Exception | None = None  # the first error of ctx.steps; user code may swallow it
    read_is_source: bool = False  # the code may depend on whether its weights count
    read_total_steps: bool = False  # the code may depend on the length of the run
    handlers: Mapping[Any, Any] = field(default_factory=dict)  # of signals, when it was called

    def failed(self, error: Exception) -> Exception:
        """Records an error. Returns the first one."""
        self.failure = self.failure or error
        return self.failure
