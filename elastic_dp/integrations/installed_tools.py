"""Says at once, and not in the middle of a run, that a tool is not installed."""

from __future__ import annotations

import importlib.util

from elastic_dp.errors import SpecError


def require(package: str, extra: str, user: str) -> None:
    """Raise SpecError if `package`, which `user` needs, is not installed."""
    if importlib.util.find_spec(package) is None:
        raise SpecError(f"{user} needs {package}: pip install 'elastic_dp[{extra}]'")
