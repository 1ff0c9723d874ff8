"""What the train function has done so far with the `TrainContext` that it was given."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class UserLoop:
    opened: bool = False  # ctx.steps was called, and its arguments are right
    in_body: bool = False  # between two steps
    exhausted: bool = False  # the loop was told that there is no further step
    failure: Exception | None = None  # what ctx.steps raised first; the user's code may swallow it
    log_calls: int = 0  # in this body
    read_is_source: bool = False
    read_total_steps: bool = False

    def failed(self, error: Exception) -> Exception:
        """Returns what was raised first."""
        self.failure = self.failure or error
        return self.failure

    def body_begins(self) -> None:
        self.in_body = True
        self.log_calls = 0

    def logs(self) -> int:
        """Returns the number of this call within the body."""
        self.log_calls += 1
        return self.log_calls
