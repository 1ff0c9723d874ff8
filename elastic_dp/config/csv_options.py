"""How CSV files are written, where they do not say it themselves."""

from __future__ import annotations

import codecs
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from elastic_dp.errors import SpecError

_OF_NUMBERS = "+-._"  # characters that are part of numbers, beside letters and digits
_QUOTE_AND_ENDS = '"\r\n\0 '


@dataclass(frozen=True)
class CsvOptions:
    """The options of `DataConfig.csv_options` and `convert(csv_options=...)`.

    - `delimiter`: the character between fields; None: a tab in files named `.tsv`, else a comma.
    - `encoding`: the files' encoding, by any of Python's names.
    - `null_values`: the words that are null, in columns of numbers and of text; None: those of
      pyarrow, in columns of numbers only.
    """

    delimiter: str | None = None
    encoding: str = "utf-8"
    null_values: tuple[str, ...] | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any] | None, owner: str = "DataConfig") -> CsvOptions:
        """Raises SpecError if an option is unknown or has a wrong value."""
        where = f"{owner}.csv_options"
        names = [field.name for field in fields(cls)]
        if given is None:
            return cls()
        if not isinstance(given, Mapping):
            raise SpecError(f"{where} is {given!r}, must be a dict of {', '.join(names)}")
        if unknown := [name for name in given if name not in names]:
            raise SpecError(f"{where} has no {unknown[0]!r}, only {', '.join(names)}")
        options = dict(given)
        _check_delimiter(where, options.get("delimiter"))
        options["encoding"] = _encoding(where, options.get("encoding", "utf-8"))
        if (words := options.get("null_values")) is not None:
            is_list = isinstance(words, Sequence) and not isinstance(words, str)
            if not is_list or not all(isinstance(word, str) for word in words):
                raise SpecError(f"{where}['null_values'] is {words!r}, must be a list of texts")
            options["null_values"] = tuple(words)
        return cls(**options)

    @property
    def identity(self) -> str:
        """A text for the options that are not the default; "" if none is."""
        found = {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if getattr(self, field.name) != field.default
        }
        return json.dumps(found) if found else ""


def _check_delimiter(where: str, delimiter: Any) -> None:
    if delimiter is None:
        return
    is_one = isinstance(delimiter, str) and len(delimiter) == 1 and delimiter.isascii()
    if is_one and not (delimiter.isalnum() or delimiter in _OF_NUMBERS + _QUOTE_AND_ENDS):
        return
    raise SpecError(
        f"{where}['delimiter'] is {delimiter!r}, must be one ASCII character, such as ';', and no "
        "letter, digit, space, quote, or part of a number"
    )


def _encoding(where: str, name: Any) -> str:
    """The normalized name of the encoding. The mark of "utf-8-sig" is passed over in any case."""
    try:
        found = codecs.lookup(name).name
        b"ab".decode(found)
    except UnicodeError:  # of an encoding with longer characters
        pass
    except (LookupError, TypeError):
        raise SpecError(
            f"{where}['encoding'] is {name!r}, must be an encoding of text that Python knows, such "
            "as 'latin-1'"
        ) from None
    return "utf-8" if found == "utf-8-sig" else found
