"""A digest of the user's code: equal for two starts of the same script and for all workers.

It covers the train function and what it reaches by name in the user's own modules: functions,
classes, and constants made of numbers and strings. It reads compiled code, so comments and line
breaks do not count, and it works in notebooks and in a worker, which may not have the source. A
pickle differs from process to process, and the text of the script changes when a limit in it is
raised, so neither is suitable. Installed packages are not covered. Python compiles differently from
one minor version to the next, so its version is stored with the digest.
"""

from __future__ import annotations

import functools
import hashlib
import types
from typing import Any

from elastic_dp.module_pickling import is_of_user
from elastic_dp.train.exactness.code_variables import closure_of, codes_in, globals_of

_WRAPPERS = (staticmethod, classmethod, functools._lru_cache_wrapper)


def code_fingerprint(train: Any, *of_data: Any, constants: bool = True) -> str:
    """Returns 16 hexadecimal digits. `of_data`: functions and classes that the data uses. Workers
    compare fingerprints without `constants`: a module of theirs may hold the name of its host."""
    walk = _Walk(constants)
    walk.visit("train", train)
    for each in of_data:
        walk.visit("data", each)
    return walk.digest.hexdigest()[:16]


def text_digest(value: Any) -> str:
    """Returns 16 hexadecimal digits of a value of numbers and texts, or of an object with such
    attributes, as of argparse; "" of any other one."""
    value = getattr(value, "__dict__", value)
    return hashlib.sha256(_text(value).encode()).hexdigest()[:16] if _is_plain(value) else ""


class _Walk:
    def __init__(self, constants: bool) -> None:
        self._constants = constants
        self.digest = hashlib.sha256()
        self._seen: set[int] = set()
        self._root = ""  # the package of the train function, which counts even if it is installed

    def visit(self, name: str, value: Any) -> None:
        if isinstance(value, functools.partial):
            for key, part in enumerate((value.func, value.args, value.keywords)):
                self.visit(f"{name}.{key}", part)
        elif isinstance(value, types.MethodType):
            self.visit(name, value.__func__)
            self.visit(name, type(value.__self__))
        elif isinstance(value, _WRAPPERS):
            self.visit(name, value.__wrapped__)
        elif isinstance(value, property):
            self.visit(name, value.fget)
        elif _is_plain(value):
            if self._constants:
                self._add(f"{name}={_text(value)}")
        elif isinstance(value, dict | list | tuple) and self._constants:
            for part in value.values() if isinstance(value, dict) else value:
                if isinstance(part, types.FunctionType | type | functools.partial):
                    self.visit(name, part)
        elif not isinstance(value, types.FunctionType | type):
            if not isinstance(value, types.ModuleType):
                self.visit(name, type(value))
        elif id(value) not in self._seen and self._is_users(value):
            self._seen.add(id(value))
            if isinstance(value, type):
                self._add_class(name, value)
            else:
                self._add_function(name, value)

    def _add(self, line: str) -> None:
        self.digest.update(line.encode() + b"\n")

    def _add_class(self, name: str, value: type) -> None:
        self._add(f"class {name}")
        for base in value.__bases__:
            self.visit(base.__qualname__, base)
        for key, member in sorted(vars(value).items()):
            if isinstance(member, (types.FunctionType, property, *_WRAPPERS)) or (
                _is_plain(member) and not key.startswith("__")
            ):
                self.visit(key, member)

    def _add_function(self, name: str, value: types.FunctionType) -> None:
        self._add(f"def {name}")
        names: set[str] = set()
        for code in codes_in(value.__code__):
            names.update(code.co_names)
            plain = [_text(c) for c in code.co_consts if _is_plain(c) and c != value.__doc__]
            self._add(f"{code.co_code.hex()} {code.co_names} {code.co_varnames} {plain}")
        self.visit("defaults", value.__defaults__)
        self.visit("keyword defaults", value.__kwdefaults__)
        for key, held in closure_of(value).items():
            self.visit(key, held)
        for key, found in sorted(globals_of(value).items()):
            self.visit(key, found)
            if isinstance(found, types.ModuleType) and is_of_user(found.__name__, self._root):
                for member in sorted(names & vars(found).keys()):
                    self.visit(f"{key}.{member}", vars(found)[member])

    def _is_users(self, value: Any) -> bool:
        module = value.__module__ or ""
        self._root = self._root or module.partition(".")[0]
        return is_of_user(module, self._root)


def _is_plain(value: Any, deepest: int = 99) -> bool:
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, tuple | list | set | frozenset):  # it may contain itself
        return deepest > 0 and all(_is_plain(one, deepest - 1) for one in value)
    return value is None or type(value) in (int, float, complex, bool, str, bytes, type(...))


def _text(value: Any) -> str:
    """Returns a text that is equal in every process, unlike the order of a set."""
    if isinstance(value, set | frozenset):
        return f"{{{sorted(map(_text, value))}}}"
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, dict):
        return f"dict{_text([*value.items()])}"
    return repr(value)
