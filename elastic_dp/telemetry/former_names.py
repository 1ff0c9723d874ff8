"""Reads journals that were written before messages and fields were renamed, as if written today."""

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
    """Return a line of events with today's names. Metrics are unchanged: their names are the
    user's.
    """
    for kind in ("event", "command"):
        if kind in line:
            renamed = {FIELDS.get(name, name): value for name, value in line.items()}
            return {**renamed, kind: MESSAGES.get(line[kind], line[kind])}
    return line
