"""Options of single sources of a mixture."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from elastic_dp.config.field_checks import callable_or_none, whole_number
from elastic_dp.errors import SpecError
from elastic_dp.urls import redact_url


@dataclass(frozen=True)
class SourceOptions:
    """The options of one source in `DataConfig.source_options`.

    - `columns`: read only these columns of the source; None: those of `DataConfig.columns`.
    - `transform`: `transform(batch, rng)`, a function of the rows of a micro-batch that are of this
      source, before `DataConfig.transform`. It returns as many rows, and all sources the same
      columns.
    - `epochs`: passes over the source, which then leaves the mixture; None: no limit.
    """

    columns: tuple[str, ...] | None = None
    transform: Callable[..., Any] | None = None
    epochs: int | None = None

    @classmethod
    def of(cls, url: str, given: Any) -> SourceOptions:
        """Raises SpecError if an option is unknown or has a wrong value."""
        where = name_of(url)
        names = [field.name for field in fields(cls)]
        if not isinstance(given, Mapping):
            raise SpecError(f"{where} is {given!r}, must be a dict of {', '.join(names)}")
        if unknown := [name for name in given if name not in names]:
            raise SpecError(f"{where} has no {unknown[0]!r}, only {', '.join(names)}")
        options = dict(given)
        if (columns := options.get("columns")) is not None:
            is_list = isinstance(columns, Sequence) and not isinstance(columns, str)
            if not is_list or not columns or not all(isinstance(name, str) for name in columns):
                raise SpecError(f"{where}['columns'] must be a list of one column name or more")
            options["columns"] = tuple(columns)
        callable_or_none(f"{where}['transform']", options.get("transform"))
        whole_number(f"{where}['epochs']", options.get("epochs"), 1)
        return cls(**options)


def name_of(url: str) -> str:
    """The options of the source, for messages."""
    return f"DataConfig.source_options[{redact_url(repr(url))}]"
