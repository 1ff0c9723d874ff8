"""The small JSON files in a run's folder: written atomically, and every fault of one has a name.

A file may be empty or truncated (a full disk, a file system without atomic rename), edited, or
written by a later version of this package. Fields that this version does not know are ignored; a
later `format` is refused.
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from elastic_dp.errors import FileDamaged, RunMismatch
from elastic_dp.storage.error_classes import ObjectMissing
from elastic_dp.storage.store import Store

_FORMAT = "format"
_NOT_FINITE = ("NaN", "Infinity", "-Infinity")
_SHOWN = 40  # characters of a wrong value in an error
T = TypeVar("T")


def path_in(store: Store, name: str) -> str:
    """Returns the path of the file `name` in the folder of the store."""
    return f"{store.path.rstrip('/')}/{name}" if store.path else name


def read_json(store: Store, name: str, newest_format: int, way_out: str) -> dict[str, Any] | None:
    """Returns the content of a file, or None if there is no such file.

    Raises FileDamaged, or RunMismatch for a file of a later format.
    """
    try:
        content = store.read_all(path_in(store, name))
    except ObjectMissing:
        return None
    where = f"{store.url.rstrip('/')}/{name}"
    stored = parse_json(bytes(content), where, way_out)
    number = stored.pop(_FORMAT, 1)  # the first format had no number
    if not isinstance(number, int):
        raise FileDamaged(where, f"its format is {_short(number)}, must be a number", way_out)
    if number > newest_format:
        raise RunMismatch(
            f"{where} is of format {number}: it was written by a newer version of "
            "elastic_dp, and this one reads up "
            f"to format {newest_format}. Upgrade elastic_dp, or use a new name= for a new run"
        )
    return stored


def write_json(
    store: Store, name: str, content: Mapping[str, Any], number: int, *, create_only: bool = False
) -> None:
    """Writes a file atomically. `number` is the number of its format.

    With `create_only`, raises FileExistsError if the file exists.
    """
    text = to_json({_FORMAT: number, **content}, indent=2)
    store.write(path_in(store, name), text.encode(), create_only=create_only)


def to_json(value: Any, indent: int | None = None) -> str:
    """Returns JSON, which has no numbers that are not finite: they become the texts "NaN",
    "Infinity" and "-Infinity". `numbers` is the way back."""
    try:
        return json.dumps(value, indent=indent, default=str, allow_nan=False)
    except ValueError:
        return json.dumps(_texts(value), indent=indent, default=str)


def numbers(value: Any) -> Any:
    """Returns a JSON value with the numbers that `to_json` has written as texts."""
    if isinstance(value, str):
        return float(value) if value in _NOT_FINITE else value
    return _map(numbers, value)


def _texts(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return json.dumps(value)
    return _map(_texts, value)


def _map(change: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: change(inner) for key, inner in value.items()}
    return [change(inner) for inner in value] if isinstance(value, list | tuple) else value


def parse_json(content: bytes, where: str, way_out: str) -> dict[str, Any]:
    """Returns a JSON object. Raises FileDamaged for any other content."""
    try:
        stored = json.loads(content)
    except (ValueError, RecursionError) as error:
        reason = "it is empty" if not content.strip() else f"it is not JSON ({error})"
        raise FileDamaged(where, reason, way_out) from None
    if not isinstance(stored, dict):
        raise FileDamaged(where, f"it holds {_short(stored)}, not a JSON object", way_out)
    return stored


def make(cls: type[T], stored: Mapping[str, Any], where: str, way_out: str) -> T:
    """Returns the dataclass that was stored. Raises FileDamaged if a field is missing or has a
    wrong type."""
    known: dict[str, Any] = {}
    hints = get_type_hints(cls)
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        if field.name in stored:
            value = stored[field.name]
            if not _fits(value, hints[field.name]):
                raise FileDamaged(where, f"its {field.name} is {_short(value)}", way_out)
            known[field.name] = tuple(value) if isinstance(value, list) else value
        elif field.default is field.default_factory is dataclasses.MISSING:
            raise FileDamaged(where, f"it has no {field.name}", way_out)
    return cls(**known)


def _fits(value: Any, hint: Any) -> bool:
    """Returns whether a JSON value fits the type of a field."""
    origin = get_origin(hint) or hint
    if origin is Any:
        return True
    if origin in (types.UnionType, Union):
        return any(_fits(value, each) for each in get_args(hint))
    if origin is Literal:
        return value in get_args(hint)
    if origin is tuple:
        return isinstance(value, list) and all(_fits(x, get_args(hint)[0]) for x in value)
    if origin is float:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return number and math.isfinite(value)
    if origin is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, origin)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
