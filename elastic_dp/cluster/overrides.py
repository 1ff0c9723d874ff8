"""Overrides of a job's fields: `elastic-dp run JOB.py --set scaling.max_workers=8`.

The script is not changed: the overrides are in force while it runs, and each `ElasticTrainer` that
it creates applies them before the job is checked. All fields of a config change together, so two
fields that bound each other may both be set. An unknown name is an error that lists the known ones.
A field of `config` must be one that the script sets, because nothing would read a misspelt one.

Written by hand: values are parsed by the annotations of our own frozen dataclasses, whose checks
name the field and the way out; a library for typed configuration would add a dependency to replace
these 100 lines.
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

_Changes = dict[tuple[str, ...], str]  # ("scaling", "max_workers") -> "8"


class Overrides:
    """Parsed `--set` options. `urls` are the folders of the runs that were created under them."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._changes: _Changes = {}
        self.urls: list[str] = []
        for text in texts:
            name, equals, value = text.partition("=")
            if not equals or not all(name.split(".")):
                raise SpecError(f"--set {text!r} must be FIELD=VALUE, as in scaling.max_workers=8")
            self._changes[tuple(name.split("."))] = value

    def created(self, url: str) -> None:
        self.urls.append(url)

    def applied(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """Return `job`, the arguments of an ElasticTrainer, with the overrides applied."""
        hints = {**typing.get_type_hints(JobSpec), "storage_path": str}
        return _changed_fields("", job, {name: hints[name] for name in job}, self._changes)


_active = Overrides(())


@contextlib.contextmanager
def overriding(overrides: Overrides) -> Iterator[None]:
    """Put overrides in force inside a `with` block."""
    global _active
    before, _active = _active, overrides
    try:
        yield
    finally:
        _active = before


def active_overrides() -> Overrides:
    """Return the overrides that are in force."""
    return _active


def _changed(name: str, value: Any, hint: Any, changes: _Changes) -> Any:
    """Return the `value` of field `name` with `changes` of it or of its own fields."""
    if () in changes:
        if len(changes) > 1 or dataclasses.is_dataclass(value):
            fields = f"set fields of it: {_names(value)}" if _names(value) else "it has no fields"
            raise SpecError(f"{name} cannot be set as a whole; {fields}")
        return _read(name, changes[()], hint)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        hints = typing.get_type_hints(type(value))
        present = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        new = _changed_fields(name, present, hints, changes)
        return dataclasses.replace(value, **{path[0]: new[path[0]] for path in changes})
    if isinstance(value, Mapping):
        of_any = (*typing.get_args(hint), Any, Any)[1]
        hints = {key: _kind(held) if of_any is Any else of_any for key, held in value.items()}
        if of_any is not Any:  # any key is valid, such as a resource that the script does not name
            hints |= {path[0]: of_any for path in changes}
        return _changed_fields(name, value, hints, changes)
    raise SpecError(f"{name} is {value!r}, and has no fields to set")


def _changed_fields(
    name: str, values: Mapping[str, Any], hints: Mapping[str, Any], changes: _Changes
) -> dict[str, Any]:
    new = dict(values)
    for first in dict.fromkeys(path[0] for path in changes):
        inner = f"{name}.{first}".lstrip(".")
        if first not in hints:
            if not name and first in REMOVED_NAMES:
                raise SpecError(REMOVED_NAMES[first])
            has = f"which has {', '.join(hints)}" if hints else "which is empty"
            raise SpecError(f"{inner} is no field of {name or 'a job'}, {has}")
        own = {path[1:]: text for path, text in changes.items() if path[0] == first}
        new[first] = _changed(inner, values.get(first), hints[first], own)
    return new


def _read(name: str, text: str, hint: Any) -> Any:
    """Return `text` as a value of type `hint`."""
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    arms = typing.get_args(hint) if union else (hint,)
    for arm in sorted(arms, key=lambda arm: arm is not type(None)):
        with contextlib.suppress(ValueError, KeyError):
            return _as(arm, text)
    raise SpecError(f"{name} is {text!r}, must be {' or '.join(_words(arm) for arm in arms)}")


def _as(arm: Any, text: str) -> Any:
    if arm is type(None):
        return {"none": None, "null": None}[text.lower()]
    if arm is bool:
        return {"true": True, "false": False}[text.lower()]
    if arm in (int, float, str):
        return arm(text)
    if arm is Any:
        try:
            return json.loads(text)
        except ValueError:
            return text
    origin = typing.get_origin(arm)
    if origin is typing.Literal:
        return {str(value): value for value in typing.get_args(arm)}[text]
    kind = {Mapping: dict, Sequence: list}.get(origin)
    if kind is list and not text.startswith("["):
        return [part.strip() for part in text.split(",")]
    if kind is not None and isinstance(value := json.loads(text), kind):
        by_number = kind is dict and typing.get_args(arm)[0] is int  # JSON has no such keys
        return {int(key): held for key, held in value.items()} if by_number else value
    raise ValueError(text)


def _kind(value: Any) -> Any:
    """Return the type of a value of `config`, which a new value must have."""
    return type(value) if isinstance(value, bool | int | float | str) else Any


def _words(arm: Any) -> str:
    known = {int: "a whole number", float: "a number", bool: "true or false", type(None): "none"}
    if typing.get_origin(arm) is typing.Literal:
        return " or ".join(map(str, typing.get_args(arm)))
    if typing.get_origin(arm) is Mapping:
        return "a JSON object"
    return known.get(arm, "what the script alone can give")


def _names(value: Any) -> str:
    fields = (
        (field.name for field in dataclasses.fields(value))
        if dataclasses.is_dataclass(value)
        else value
    )
    return ", ".join(fields)
