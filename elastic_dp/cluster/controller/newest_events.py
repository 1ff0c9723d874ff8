"""What a run's status says of its journal: the newest decision and the newest checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from elastic_dp.telemetry.journal import Journal


class NewestEvents:
    """Follows a journal. `status` may be called by any thread.

    Ages are those of the clock that wrote the journal, so a reader's clock does not matter. A
    decision that is repeated keeps its first time. The age of a checkpoint from which the run went
    on is not known.
    """

    def __init__(self, journal: Journal) -> None:
        self._event: tuple[float, str] | None = None
        self._checkpoint: tuple[float | None, int] | None = None
        self._duration_s: float | None = None  # of the last commit
        journal.listen(self._line)

    def status(self, now: float) -> dict[str, Any]:
        """Return the fields at `now` (of `time.time`); None before the first of each."""
        found: dict[str, Any] = {"newest_event": None, "newest_checkpoint": None}
        if (event := self._event) is not None:
            at, text = event
            found["newest_event"] = {"text": text, "age_s": max(0.0, now - at)}
        if (checkpoint := self._checkpoint) is not None:
            saved_at, step = checkpoint
            age_s = None if saved_at is None else max(0.0, now - saved_at)
            newest = {"step": step, "age_s": age_s, "duration_s": self._duration_s}
            found["newest_checkpoint"] = newest
        return found

    def _line(self, line: Mapping[str, Any]) -> None:
        match line.get("event") or line.get("command"):
            case "Explain":
                if self._event is None or self._event[1] != line["text"]:
                    self._event = line["time"], line["text"]
            case "CheckpointCommitted":
                self._checkpoint = line["time"], line["step"]
                self._duration_s = line.get("duration_s") or self._duration_s
            case "CheckpointFound":
                step = line["step"]
                same = self._checkpoint is not None and self._checkpoint[1] == step
                if not same:
                    self._checkpoint = (None, step) if step else None
