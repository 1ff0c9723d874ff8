"""What the page can ask of a run, and how a request's JSON becomes a call of `Run`.

Each request is checked before anything is asked of a cluster. Fields that are not known are
refused.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from elastic_dp.errors import SpecError
from elastic_dp.storage import StorageURL
from elastic_dp.wording import counted

_MOST_WORKERS = 1_000_000
_MOST_CHARACTERS = 200
_MOST_S = 1e9
_TEXT = "^[^\\x00-\\x1f\\x7f-\\x9f]+$"  # no control characters


class ControlledRun(Protocol):
    """The methods of `Run` that the page calls. They return at once."""

    def scale(self, size: int | None = None, *, min_workers: int | None = None) -> None: ...
    def drain(self, worker: str, within_s: float | None = None) -> None: ...
    def checkpoint(self) -> None: ...
    def stop(self, reason: str = ...) -> None: ...


class RunControls(Protocol):
    """Finds live runs."""

    def live(self, name: str, url: StorageURL) -> ControlledRun:
        """Return the live run of that name in that folder. Raises ClusterError."""


class RayControls:
    """The live runs of the Ray cluster that has the first one that is asked for."""

    def __init__(self, address: str | None) -> None:
        self._address, self._lock = address, threading.Lock()

    def live(self, name: str, url: StorageURL) -> ControlledRun:
        from elastic_dp.cluster.runs.attach import find_live

        with self._lock:
            return find_live(name, url, self._address)


def _scale(run: ControlledRun, size: int, min_workers: int | None) -> str:
    run.scale(size, min_workers=min_workers)
    least = "" if min_workers is None else f", at least {min_workers} needed"
    return f"{counted(size, 'worker')} asked for{least}"


def _drain(run: ControlledRun, worker: str, within_s: float | None) -> str:
    run.drain(worker, within_s)
    return f"{worker} leaves once it is replaced"


def _checkpoint(run: ControlledRun) -> str:
    run.checkpoint()
    return "a checkpoint of one of the next steps will be made"


def _stop(run: ControlledRun, reason: str | None) -> str:
    run.stop(reason or "asked on the page")
    return "the run ends after one of its next steps, with a checkpoint"


_SURROGATE = re.compile("[\ud800-\udfff]")  # half a character, which JSON may hold

# verb: what it does, and its fields with their types; "?": the field may be left out, or be null
VERBS: dict[str, tuple[Callable[..., str], dict[str, str]]] = {
    "scale": (_scale, {"size": "workers", "min_workers": "workers?"}),
    "drain": (_drain, {"worker": "text", "within_s": "seconds?"}),
    "checkpoint": (_checkpoint, {}),
    "stop": (_stop, {"reason": "text?"}),
}
# type: its JSON schema, for the description of the API
TYPES: dict[str, dict[str, Any]] = {
    "workers": {"type": "integer", "minimum": 1, "maximum": _MOST_WORKERS},
    "seconds": {"type": "number", "minimum": 0, "maximum": _MOST_S},
    "text": {"type": "string", "maxLength": _MOST_CHARACTERS, "pattern": _TEXT},
}


def fields_of(verb: str, body: Any) -> dict[str, Any]:
    """Return the fields of a request. Raises SpecError, which names the field."""
    known = VERBS[verb][1]
    if not isinstance(body, Mapping):
        raise SpecError("the body must be a JSON object")
    for name in body:
        if name not in known:
            names = ", ".join(known) or "none"
            raise SpecError(f"{name[:40]!r} is not a field of {verb}, which has: {names}")
    fields = {name: _as_json_has_it(body.get(name)) for name in known}
    for name, kind in known.items():
        value, type_ = fields[name], kind.removesuffix("?")
        if not _fits(type_, value) and not (value is None and kind.endswith("?")):
            is_so = "is missing" if value is None else f"is {str(value)[:40]!r}"
            raise SpecError(f"{name} {is_so}, must be {_MUST[type_]}")
    return fields


def _as_json_has_it(value: Any) -> Any:
    """In JSON 3.0 is a whole number."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


_MUST = {
    "workers": f"a whole number within 1..{_MOST_WORKERS}",
    "seconds": "a number of seconds",
    "text": f"a text of 1 to {_MOST_CHARACTERS} characters, none of them a control character",
}


def _fits(kind: str, value: Any) -> bool:
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if kind == "workers":
        return is_whole and 1 <= value <= _MOST_WORKERS
    if kind == "seconds":
        is_number = is_whole or isinstance(value, float)
        return is_number and math.isfinite(value) and 0 <= value <= _MOST_S
    if not isinstance(value, str) or len(value) > _MOST_CHARACTERS:
        return False
    return re.fullmatch(_TEXT, value) is not None and not _SURROGATE.search(value)
