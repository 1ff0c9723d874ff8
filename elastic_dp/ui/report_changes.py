"""What has changed between two reports, so that a client need not get the whole report again.

A change is [kind, path, value]: "set" puts `value` at `path`, "add" appends the elements of `value`
to the list at `path`. Most of a report are lists that grow.
"""

from __future__ import annotations

from typing import Any

Change = tuple[str, list[str], Any]


def changes(before: Any, after: Any, path: tuple[str, ...] = ()) -> list[Change]:
    """Return the changes that make `after` of `before`."""
    if before == after:
        return []
    if isinstance(before, dict) and isinstance(after, dict) and before.keys() <= after.keys():
        found = [
            changes(before[key], value, (*path, key))
            if key in before
            else [("set", [*path, key], value)]
            for key, value in after.items()
        ]
        return [change for each in found for change in each]
    if isinstance(before, list) and isinstance(after, list):
        grown = len(after) > len(before) > 0 and after[: len(before)] == before
        if grown:
            return [("add", list(path), after[len(before) :])]
    return [("set", list(path), after)]
