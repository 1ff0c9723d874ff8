"""The port of loggers that keep what they have logged: TensorBoard, Weights & Biases, MLflow.

Such a logger says at `open` how far its tool has the run. So what was logged is not logged again
after a restart of the driver, and what the driver missed is read from the run's folder.
"""

from __future__ import annotations

import importlib.util
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field

from elastic_dp.errors import SpecError


@dataclass(frozen=True, slots=True)
class LoggedSoFar:
    """What a tool has of a run: the last step of all metrics, or of each, and the time of the last
    event.
    """

    step: int = -1
    steps: Mapping[str, int] = field(default_factory=dict)
    events_until: float = 0.0

    def last_step(self, metric: str) -> int:
        return max(self.step, self.steps.get(metric, -1))


class RunLogger(ABC):
    """One tool. All methods are called by one thread, which may wait and fail: training does not
    wait for it. After an exception `open` is called again.
    """

    @abstractmethod
    def open(self, run: str, began: float) -> LoggedSoFar:
        """Create or resume the run that was started at `began` (of `time.time`)."""

    @abstractmethod
    def log(self, at: float, step: int, metrics: Mapping[str, float]) -> None:
        """Log metrics of a step, which the tool does not have yet."""

    @abstractmethod
    def annotate(self, at: float, step: int, text: str) -> None:
        """Log an event of the run, such as a lost worker."""

    def flush(self) -> None:  # noqa: B027
        """Send what is held back. Called within seconds of each record."""

    @abstractmethod
    def close(self) -> None:
        """End the connection. May be called when nothing is open."""


def start_time(began: float) -> str:
    """Return the time of a run's first line, as part of its name in a tool."""
    return time.strftime("%Y%m%d-%H%M%S", time.gmtime(began))


def require(package: str, extra: str, user: str) -> None:
    """Raise SpecError if `package`, which `user` needs, is not installed."""
    if importlib.util.find_spec(package) is None:
        raise SpecError(f"{user} needs {package}: pip install 'elastic_dp[{extra}]'")
