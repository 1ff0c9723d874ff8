"""Whether a field that a command names is one of a job."""

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any


def is_field(kind: Any, path: list[str]) -> bool:
    """Whether a config (a JobSpec, say) has a field at the path."""
    if not path:
        return True
    options = [kind, *typing.get_args(kind)]
    if any(typing.get_origin(option) is Mapping for option in options):
        return len(path) == 1
    for option in options:
        if dataclasses.is_dataclass(option) and path[0] in typing.get_type_hints(option):
            return is_field(typing.get_type_hints(option)[path[0]], path[1:])
    return False
