"""What a person at the terminal sees of a run: one line for each thing that matters, as it happens."""

from __future__ import annotations

import sys
import time
from typing import Any, TextIO


class Progress:
    """Prints journal lines in words; logged metrics at most every `interval_s`."""

    def __init__(self, stream: TextIO | None = None, interval_s: float = 0.5) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._interval_s = interval_s
        self._last = 0.0
        self._started = time.time()
        self._over = False  # from then on workers go because they are told to

    def show(self, line: dict[str, Any]) -> None:
        if "event" not in line and "command" not in line:
            self._metrics(line)
        elif line.get("command") == "Explain":
            self._print(line["text"])
        elif line.get("command") in ("FinishRun", "FailRun"):
            self._over = True
        elif line.get("event") == "WorkerLost" and not self._over:
            self._print(f"{line['worker']} is gone: {line['reason']}")

    def _metrics(self, line: dict[str, Any]) -> None:
        now = time.time()
        if now - self._last < self._interval_s:
            return
        self._last = now
        values = "  ".join(
            f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
            for key, value in line.items()
            if key not in ("time", "step") and not (isinstance(value, str) and len(value) > 60)
        )
        if values:
            self._print(f"step {line['step']:>6}  {values}")

    def _print(self, text: str) -> None:
        elapsed = time.time() - self._started
        print(f"[{elapsed:6.1f} s] {text}", file=self._stream, flush=True)
