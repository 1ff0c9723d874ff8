"""Shows a run in the terminal: one line for each event that matters, as it happens."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any, TextIO


class ProgressPrinter:
    """Prints journal lines in words.

    A metric is printed at most every `interval_s` seconds, and its last value always; a line with
    any metric that is due is printed completely.
    """

    def __init__(self, stream: TextIO | None = None, interval_s: float = 0.5) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._interval_s, self._of = interval_s, ""
        self._shown: dict[str, float] = {}  # when each metric was last printed
        self._held: dict[str, tuple[int, Any]] = {}  # step and newest value that was not printed
        self._started = time.time()
        self._over = False  # after the end of the run, lost workers are not reported

    def expect(self, total: int | None) -> None:
        """Print steps as a part of `total`. None: not known."""
        self._of = "" if total is None else f"/{total}"

    def show(self, line: dict[str, Any]) -> None:
        """Print a line of the journal, if it is of interest."""
        if "event" not in line and "command" not in line:
            self._metrics(line)
        elif line.get("command") == "Explain":
            self.say(line["text"])
        elif line.get("command") in ("FinishRun", "FailRun"):
            self._over = True
            self.flush()
        elif line.get("event") == "WorkerLost" and not self._over:
            asked = line.get("cause") == "released"
            self.say(f"{line['worker']} {'' if asked else 'is gone: '}{line['reason']}")

    def say(self, text: str) -> None:
        """Print a text with the elapsed time."""
        elapsed = time.time() - self._started
        print(f"[{elapsed:6.1f} s] {text}", file=self._stream, flush=True)

    def flush(self) -> None:
        """Print the values that were held back. Called at every end."""
        held, self._held = self._held, {}
        for step in sorted({step for step, _ in held.values()}):
            self._print(step, {name: value for name, (of, value) in held.items() if of == step})

    def _metrics(self, line: Mapping[str, Any]) -> None:
        step, now = line["step"], time.time()
        values = {
            name: value
            for name, value in line.items()
            if name not in ("time", "step") and not (isinstance(value, str) and len(value) > 60)
        }
        if all(now - self._shown.get(name, 0.0) < self._interval_s for name in values):
            self._held |= {name: (step, value) for name, value in values.items()}
            return
        for name in values:
            self._shown[name] = now
            self._held.pop(name, None)
        self._print(step, values)

    def _print(self, step: int, values: Mapping[str, Any]) -> None:
        words = "  ".join(
            f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in values.items()
        )
        self.say(f"step {step:>6}{self._of}  {words}")
