"""The public interface as data: each documented name with its parameters and defaults."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import typer

from elastic_dp.cli import app

PAGE = Path(__file__).parent.parent.parent / "docs" / "api.md"


def documented_names() -> list[str]:
    """Return what the API reference lists: `::: elastic_dp.Run`."""
    return re.findall(r"^::: (\S+)", PAGE.read_text(), re.M)


def public_api() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in documented_names():
        value = _resolve(name)
        if inspect.ismodule(value):
            for each, member in vars(value).items():
                if not each.startswith("_") and getattr(member, "__module__", "") == name:
                    found[f"{name}.{each}"] = _described(member)
        else:
            found[name] = _described(value)
    return dict(sorted(found.items()))


def command_line() -> dict[str, dict[str, str]]:
    """Return each command with its arguments and options, and their defaults."""
    found: dict[str, dict[str, str]] = {}

    def add(words: tuple[str, ...], command: Any) -> None:
        for name, inner in getattr(command, "commands", {}).items():
            add((*words, name), inner)
        found[" ".join(words)] = {
            " ".join([*p.opts, *p.secondary_opts]): repr(p.default)
            for p in command.params
            if "completion" not in p.name
        }

    add(("elastic-dp",), typer.main.get_command(app))
    return dict(sorted(found.items()))


def _resolve(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        module, _, last = name.rpartition(".")
        return getattr(_resolve(module), last)


def _described(value: Any) -> Any:
    if not inspect.isclass(value):
        return _parameters(value) if callable(value) else repr(value)
    bases = [base.__qualname__ for base in value.__bases__ if base is not object]
    members: dict[str, Any] = {"__init__": _parameters(value), "bases": bases}
    for name in sorted(dir(value)):
        if name.startswith("_") or not _is_ours(value, name):
            continue
        member = inspect.getattr_static(value, name)
        if isinstance(member, staticmethod | classmethod):
            member = member.__func__
        if inspect.isfunction(member):
            members[name] = _parameters(member)
        elif isinstance(member, property):
            members[name] = "property"
    if dataclasses.is_dataclass(value):
        members["made_defaults"] = {
            field.name: _shown(field.default_factory())
            for field in dataclasses.fields(value)
            if field.default_factory is not dataclasses.MISSING
        }
    return members


def _is_ours(cls: type, name: str) -> bool:
    home = next(base for base in cls.__mro__ if name in vars(base))
    return home.__module__.startswith("elastic_dp")


def _parameters(function: Any) -> list[str]:
    """Return the parameters in order, as they are declared, without their types."""
    found, star = [], False
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # an exception class without parameters of its own
        return ["*args"]
    for parameter in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            found.append("*")
            star = True
        marks = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}
        star = star or parameter.kind is parameter.VAR_POSITIONAL
        default = "" if parameter.default is parameter.empty else f"={_shown(parameter.default)}"
        found.append(marks.get(parameter.kind, "") + parameter.name + default)
    return found


def _shown(default: Any) -> str:
    if callable(default) or " object at 0x" in repr(default):
        return getattr(default, "__qualname__", type(default).__qualname__)
    return repr(default)
