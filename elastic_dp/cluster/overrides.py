"""`elastic-dp run JOB.py --set scaling.max_workers=8`: changes of a job's fields.

They are in force while the script runs: each `ElasticTrainer` that it makes applies them. Values
are JSON, or texts. The checks of the configs refuse a wrong one; a field of `config` must be one
that the script sets, because nothing would read a misspelt one, and keeps its type.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from elastic_dp.config import JobSpec
from elastic_dp.config.removed_names import REMOVED_NAMES
from elastic_dp.errors import SpecError

_Changes = Mapping[tuple[str, ...], str]  # ("scaling", "max_workers") -> "8"


class Overrides:
    """Parsed `--set` options. `urls` are the folders of the runs that were created under them.

    `restarts`: a live run of the same folder is stopped, and continued with the new job.
    """

    def __init__(self, texts: Sequence[str] = (), *, restarts: bool = False) -> None:
        self.restarts, self.urls = restarts, list[str]()
        self._changes: dict[tuple[str, ...], str] = {}
        for text in texts:
            name, equals, value = text.partition("=")
            if not equals or not all(name.split(".")):
                raise SpecError(f"--set {text!r} must be FIELD=VALUE, as in scaling.max_workers=8")
            self._changes[tuple(name.split("."))] = value

    def applied(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """Return `job`, the arguments of an ElasticTrainer, with the overrides applied."""
        hints = {**typing.get_type_hints(JobSpec), "storage_path": str}
        return {**job, **_changed("a job", job, hints, self._changes)} if self._changes else {**job}


active = Overrides()


@contextlib.contextmanager
def overriding(overrides: Overrides) -> Iterator[None]:
    """Put overrides in force inside a `with` block."""
    global active
    before, active = active, overrides
    try:
        yield
    finally:
        active = before


def _changed(
    name: str, fields: Mapping[str, Any], hints: Mapping[str, Any], changes: _Changes
) -> dict[str, Any]:
    """Return the new values of the fields that change. All of an object change together."""
    new = {}
    for first in dict.fromkeys(path[0] for path in changes):
        inner = first if name == "a job" else f"{name}.{first}"
        if first not in fields and first in REMOVED_NAMES and name != "config":
            raise SpecError(REMOVED_NAMES[first])
        if first not in fields and hints.get("*") is None:
            raise SpecError(f"{inner} is no field of {name}; it has: {', '.join(fields) or 'none'}")
        old: Any = fields.get(first)
        hint = hints.get(first, hints.get("*", Any))
        own = {path[1:]: text for path, text in changes.items() if path[0] == first}
        is_config = dataclasses.is_dataclass(old) and not isinstance(old, type)
        if () in own and not is_config and len(own) == 1:
            new[first] = _read(inner, own[()], old, hint)
        elif is_config and () not in own:
            held = {field.name: getattr(old, field.name) for field in dataclasses.fields(old)}
            more = _changed(inner, held, typing.get_type_hints(type(old)), own)
            new[first] = dataclasses.replace(old, **more)
        elif isinstance(old, Mapping) and () not in own:
            of_any = (*typing.get_args(hint), Any, Any)[1] is Any
            new[first] = {**old, **_changed(inner, old, {} if of_any else {"*": float}, own)}
        else:
            raise SpecError(f"{inner} is set as a whole, or has no such fields: set its own fields")
    return new


def _read(name: str, text: str, old: Any, hint: Any) -> Any:
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    kinds = typing.get_args(hint) if union else (hint,)
    if str in kinds and not (text.lower() == "none" and type(None) in kinds):
        return json.loads(text) if text.startswith("[") else text
    try:
        word = {"none": "null"}.get(text.lower(), text.lower())
        value = json.loads(word if word in ("null", "true", "false") else text)
    except ValueError:
        value = text
    if isinstance(value, dict):  # JSON has no numbers as keys
        value = {int(key) if key.isdecimal() else key: held for key, held in value.items()}
    if hint is Any and isinstance(old, bool | int | float | str):
        value = float(value) if isinstance(old, float) and type(value) is int else value
        value = text if isinstance(old, str) else value
        if type(value) is not type(old):
            raise SpecError(
                f"{name} is {text!r}, must be of type {type(old).__name__}, like {old!r}"
            )
    return value
