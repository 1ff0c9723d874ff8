"""Shows a run in the terminal: one line for each event that matters, as it happens.

If the stream is a terminal and rich is installed, a progress bar is shown below the lines.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections.abc import Mapping
from typing import Any, TextIO


class ProgressPrinter:
    """Prints journal lines in words.

    A metric is printed at most every `interval_s` seconds, and its last value always; a line with
    any metric that is due is printed completely. None: 0.5 s, or 30 s beside a progress bar, which
    shows every value.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        interval_s: float | None = None,
    ) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._bar = _Bar(self._stream) if _shows_a_bar(self._stream) else None
        usual_s = 0.5 if self._bar is None else 30.0
        self._interval_s = usual_s if interval_s is None else interval_s
        self._shown: dict[str, float] = {}  # when each metric was last printed
        self._held: dict[str, tuple[int, Any]] = {}  # step and newest value that was not printed
        self._started = time.time()
        self._over = False  # after the end of the run, lost workers are not reported

    def expect(self, total: int | None) -> None:
        """Show how far the run is of `total` steps, and the remaining time. None: not known."""
        if self._bar is not None:
            self._bar.expect(total)

    def show(self, line: dict[str, Any]) -> None:
        """Print a line of the journal, if it is of interest."""
        if self._bar is not None and not self._over:
            self._bar.show(line)
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
        words = f"[{elapsed:6.1f} s] {text}"
        if self._bar is not None:
            self._bar.print(words)
        else:
            print(words, file=self._stream, flush=True)

    def flush(self) -> None:
        """Print the values that were held back and remove the bar. Called at every end."""
        if self._bar is not None:
            self._bar.stop()
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
        self.say(f"step {step:>6}  {words}")


def _shows_a_bar(stream: TextIO) -> bool:
    return (
        stream.isatty()
        and os.environ.get("TERM") != "dumb"
        and importlib.util.find_spec("rich") is not None
    )


class _Bar:
    """A progress bar in the last line of the terminal: step, metrics, workers and remaining time.

    It is drawn when something changes, and never by a thread of its own, because this process may
    fork.
    """

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self._console = Console(file=stream, highlight=False, soft_wrap=True)
        self._rich = Progress(
            TextColumn("step {task.completed}{task.fields[of]}"),
            BarColumn(30),
            TimeRemainingColumn(),
            TextColumn("{task.fields[workers]}  {task.fields[metrics]}", markup=False),
            console=self._console,
            auto_refresh=False,
            transient=True,
        )
        self._task = self._rich.add_task("", total=None, of="", workers="", metrics="")

    def expect(self, total: int | None) -> None:
        self._rich.update(self._task, total=total, of="" if total is None else f"/{total}")

    def show(self, line: Mapping[str, Any]) -> None:
        if "members" in line:
            size = len(line["members"])
            self._rich.update(self._task, workers=f"{size} worker{'' if size == 1 else 's'}")
        elif "event" not in line and "command" not in line:
            numbers = {k: v for k, v in line.items() if isinstance(v, float) and k != "time"}
            words = "  ".join(f"{name} {value:.4g}" for name, value in numbers.items())
            self._rich.update(self._task, completed=line["step"], metrics=words)
        else:
            return
        self._rich.start()
        self._rich.refresh()

    def print(self, text: str) -> None:
        self._console.print(text, markup=False)

    def stop(self) -> None:
        self._rich.stop()
