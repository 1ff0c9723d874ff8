"""Names in journals that were written before they changed: a line is read as if it were written
today."""

from __future__ import annotations

from typing import Any

MESSAGES = {
    "WorkerHeard": "HeartbeatReceived",
    "CheckpointSealed": "CheckpointCommitted",
    "KeepState": "WriteDrainCheckpoint",
    "StacksTaken": "StackTracesCaptured",
    "ReportYourself": "ReportState",
}
FIELDS = {
    "place": "position",
    "whole": "has_state",
    "founded": "lineage_id",
    "disagreement": "mismatch",
    "home": "location",
}


def with_current_names(line: dict[str, Any]) -> dict[str, Any]:
    """A line of metrics is returned as it is: its names are the user's."""
    for kind in ("event", "command"):
        if kind in line:
            renamed = {FIELDS.get(name, name): value for name, value in line.items()}
            return {**renamed, kind: MESSAGES.get(line[kind], line[kind])}
    return line
