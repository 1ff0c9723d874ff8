"""The workloads that `benchmarks.against_commit` runs on two trees of the package.

Each is a module with its `CASES`, run as `python -m benchmarks.paired.step FOLDER CASE` with
`PYTHONPATH` set to a tree. Names moved between commits, so a workload uses the public API only,
and `elastic_dp.data.open_data`. Smaller is better for all that it measures.

Both sides are alive at the same time, and take turns through files in a folder of each (`Turns`):
the parent allows turn n (`go-n`), the workload measures, answers with its values (`done-n`), and
does nothing until the next turn is allowed. Turn 0 needs no permission: it warms up.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

IDLE_S = 300.0  # a workload that waits for its turn for longer ends
POLL_S = 0.005


class Turns:
    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def wait(self, number: int) -> bool:
        """Waits until turn `number` is allowed. False: there is none."""
        until = time.monotonic() + IDLE_S
        while not self.path("go", number).exists():
            if (self._folder / "over").exists() or time.monotonic() > until:
                return False
            time.sleep(POLL_S)
        return True

    def answer(self, number: int, found: dict[str, Any]) -> None:
        """Answers turn `number` with the values of each name; turn 0 with the path of
        `elastic_dp`."""
        if number == 0:
            import elastic_dp

            found = {"elastic_dp": elastic_dp.__file__}
        path = self._folder / "answer.part"
        path.write_text(json.dumps(found))
        path.rename(self.path("done", number))

    def path(self, kind: str, number: int) -> Path:
        return self._folder / f"{kind}-{number}"


def serve(folder: str, turn: Callable[[int], dict[str, list[float]]]) -> None:
    """Calls `turn(number)` for its values, each time that one is allowed."""
    turns, number = Turns(folder), 0
    while number == 0 or turns.wait(number):
        turns.answer(number, turn(number))
        number += 1


def start_ray(niceness: int = 0) -> None:
    """A Ray of this machine alone, whose workers import from the tree of this process."""
    from benchmarks import recovery

    recovery.start_ray(niceness, os.environ["PYTHONPATH"])
