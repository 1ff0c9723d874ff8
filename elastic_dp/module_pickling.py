"""Pickles values for other processes, together with the source of the user's own modules.

The modules need not exist on the other process's disk. A value is pickled by cloudpickle: what is
defined in `__main__` by value, everything else by the name of its module. The source of every
imported module that belongs to no installed package is sent along. The process that unpickles the
value finds these modules before those on its disk, as ordinary modules that are imported when they
are first needed. So dataclasses, type hints, pickles and `inspect.getsource` work as usual, and a
worker that starts after a file was edited runs the code that the run was started with.

The result is an ordinary pickle for `pickle.loads`. Attributes that the sender has set on a module
since its import are not in its source, and are not sent.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import io
import linecache
import pickle
import sys
import sysconfig
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from types import CodeType, ModuleType
from typing import Any

import cloudpickle

from elastic_dp.errors import SpecError

_STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"]
_NOT_SHIPPED = {"elastic_dp", "__main__", "__mp_main__"}


@dataclass(frozen=True, slots=True)
class _Module:
    """The source of one module."""

    file: str
    source: bytes | None  # None: a package without a file
    path: list[str] | None  # where else the modules of a package are looked for


def pickle_with_modules(value: Any, named: str = "a value") -> bytes:
    """Return `value` and the user's modules as a pickle. Raises SpecError if it has none."""
    try:
        pickled = pickle_by_value(value)
    except Exception as error:  # pickling runs the user's own code
        raise SpecError(
            f"{named} cannot be sent to workers: {type(error).__name__}: {error}. Open files, "
            "locks and connections inside the functions that use them, not outside"
        ) from error
    return pickle.dumps(_PickledWithModules(zlib.compress(pickle.dumps(_own_modules())), pickled))


def pickle_by_value(value: Any) -> bytes:
    """Return `value` as a pickle, with the file names of its code. Raises what pickling raises."""
    file = io.BytesIO()
    Pickler(file).dump(value)
    return file.getvalue()


class Pickler(cloudpickle.Pickler):
    """Keeps the file name of code, without which a traceback shows no source lines.

    cloudpickle 3.1.3 writes "<dynamic-code>" instead, so that equal code gives equal pickles.
    `torch.save` uses this class where this module is its `pickle_module`.
    """

    def reducer_override(self, item: Any) -> Any:
        if isinstance(item, CodeType):
            function, arguments = self.dispatch_table[CodeType](item)
            return _code, (item.co_filename, function, *arguments)
        return super().reducer_override(item)


def _code(file: str, function: Any, *arguments: Any) -> CodeType:
    code: CodeType = function(*arguments)
    return code.replace(co_filename=file)


def is_installed(file: str) -> bool:
    """Return whether a module's file belongs to an installed package, which workers have as
    well.
    """
    return "site-packages" in file or "dist-packages" in file or file.startswith(_STANDARD_LIBRARY)


def is_of_user(module: str, root: str) -> bool:
    """Return whether a module is the user's: of the package `root`, which may be installed, or of
    no installed package.
    """
    top = module.partition(".")[0]
    if top in ("elastic_dp", "builtins"):
        return False
    if top == root or module not in sys.modules:
        return True
    file = getattr(sys.modules[module], "__file__", None)
    return file is not None and not is_installed(file)


class _PickledWithModules:
    def __init__(self, modules: bytes, pickled: bytes) -> None:
        self._parts = modules, pickled

    def __reduce__(self) -> Any:
        return _open, self._parts


def _open(modules: bytes, pickled: bytes) -> Any:
    _finder.add(pickle.loads(zlib.decompress(modules)))
    return pickle.loads(pickled)


def _own_modules() -> dict[str, _Module]:
    """Return the user's modules by name.

    Modules that were sent to this process come before those on its disk. A package with a compiled
    module is not sent at all, because its source alone is not enough.
    """
    found = dict(_finder.modules)
    modules = list(sys.modules.items())
    not_shipped = _NOT_SHIPPED | {_root(name) for name, module in modules if _is_compiled(module)}
    for name, module in modules:
        if name not in found and _root(name) not in not_shipped:
            own = _own(module)
            if own is not None:
                found[name] = own
    for name in list(found):  # a module imported by its path may lack an importable package
        while (name := name.rpartition(".")[0]) and name not in found:
            if "__path__" not in vars(sys.modules.get(name) or object):
                found[name] = _Module("", None, [])
    return found


def _root(name: str) -> str:
    return name.partition(".")[0]


def _is_compiled(module: ModuleType | None) -> bool:
    loader = vars(module).get("__loader__") if isinstance(module, ModuleType) else None
    return isinstance(loader, importlib.machinery.ExtensionFileLoader)


def _own(module: ModuleType | None) -> _Module | None:
    """Return the source of a module, or None if it is not the user's or has no source."""
    if not isinstance(module, ModuleType):
        return None
    held = vars(module)  # asking some modules for an attribute creates it
    file, path = held.get("__file__"), held.get("__path__")
    paths = None if path is None else list(map(str, path))
    if file is None and paths and not any(map(is_installed, paths)):
        return _Module("", None, paths)
    if not isinstance(file, str) or not file.endswith(".py") or is_installed(file):
        return None
    with contextlib.suppress(OSError), open(file, "rb") as source:
        return _Module(file, source.read(), paths)
    return None


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules that were sent to this process."""

    def __init__(self) -> None:
        self.modules: dict[str, _Module] = {}

    def add(self, modules: dict[str, _Module]) -> None:
        self.modules |= {name: m for name, m in modules.items() if name not in sys.modules}
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        module = self.modules.get(fullname)
        if module is None:
            return None
        if module.source is None:
            spec = importlib.machinery.ModuleSpec(fullname, None, is_package=True)
            spec.submodule_search_locations = module.path
            return spec
        loader = _Loader(fullname, module.file, module.source)
        return importlib.util.spec_from_file_location(
            fullname, module.file, loader=loader, submodule_search_locations=module.path
        )


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads a module from its source as if its file existed; data beside the file is read from
    disk.
    """

    def __init__(self, fullname: str, path: str, source: bytes) -> None:
        super().__init__(fullname, path)
        self._source = source

    def get_data(self, path: str) -> bytes:
        return self._source if path == self.path else super().get_data(path)

    def get_code(self, fullname: str) -> CodeType | None:
        """Compile the source, never a cached file, which may be of another source.

        Tracebacks show this source, too.
        """
        lines = importlib.util.decode_source(self._source).splitlines(keepends=True)
        linecache.cache[self.path] = len(self._source), None, lines, self.path
        return self.source_to_code(self._source, self.path)


_finder = _Finder()
