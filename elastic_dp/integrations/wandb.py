"""Logs a run to Weights & Biases: metrics by step, events of the run as `run_event`.

The run's id is made of its name and the time of its start, and it is resumed by each driver.
Offline there is nothing to resume, so each driver writes the whole run into a folder of its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from elastic_dp.errors import SpecError
from elastic_dp.telemetry.run_logger import LoggedSoFar, RunLogger, require, start_time

_EVENT = "run_event"
_UNTIL = "run_events_until"
_MAX_ID = 128


class WandbLogger(RunLogger):
    """Arguments are those of `wandb.init`, without `id`, `resume` and `reinit`."""

    def __init__(self, project: str | None = None, **init: Any) -> None:
        require("wandb", "wandb", type(self).__name__)
        if ours := {"id", "resume", "reinit"} & init.keys():
            raise SpecError(
                f"WandbLogger got {', '.join(sorted(ours))}, which it sets so that a driver that "
                "is started again resumes the run: remove it"
            )
        self._init = {"project": project, **init}
        self._run: Any = None
        self._step, self._texts = -1, [""]
        self._failed = False

    def open(self, run: str, began: float) -> LoggedSoFar:
        import wandb

        # Output is the terminal's: wandb would replace sys.stdout from this thread.
        settings = {"console": "off"} | dict(self._init.get("settings") or {})
        init = {"name": run, **self._init, "settings": settings}
        ident = f"{re.sub(r'[^-_.a-zA-Z0-9]', '_', run)}-{start_time(began)}"[-_MAX_ID:]
        self._run = wandb.init(id=ident, resume=_resume(init), reinit="create_new", **init)
        self._step, self._texts, self._failed = -1, [], False
        until = self._run.summary.get(_UNTIL) or 0.0
        return LoggedSoFar(step=self._run.step - 1, events_until=float(until))

    def log(self, at: float, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def annotate(self, at: float, step: int, text: str) -> None:
        step = max(step, self._run.step)  # steps only grow
        if step != self._step:
            self._step, self._texts = step, []
        self._texts.append(text)
        self._failed = text.startswith("end: failed")
        self._run.log({_EVENT: "\n".join(self._texts)}, step=step)
        self._run.summary[_UNTIL] = at

    def close(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.finish(exit_code=int(self._failed))


def _resume(init: Mapping[str, Any]) -> Literal["allow"] | None:
    import wandb

    mode = init.get("mode") or wandb.setup().settings.mode
    return None if mode in ("offline", "disabled") else "allow"
