"""Ray and torch without what takes seconds of the start of each process, and no test of them looks
at. Python imports this by its name, from PYTHONPATH.

The agent of a node imports nothing for a dashboard, as where Ray is installed without its extra
`default`. And the first optimizer of a worker does not import torch's compiler.
"""

import sys
import types
from collections.abc import Callable
from typing import Any


class _NoCompiler(types.ModuleType):
    """What torch calls of `torch._dynamo` where nothing is compiled, and what it sets of
    `torch._inductor`."""

    @staticmethod
    def disable(function: Callable[..., Any], *_: Any, **__: Any) -> Callable[..., Any]:
        return function

    @staticmethod
    def graph_break() -> None:
        pass


_modules: dict[str, Any] = sys.modules
_modules["ray.dashboard.optional_deps"] = None  # to import it fails
for _name in ("torch._dynamo", "torch._inductor", "torch._inductor.config"):
    _modules[_name] = _NoCompiler(_name)
_modules["torch._inductor"].config = _modules["torch._inductor.config"]
