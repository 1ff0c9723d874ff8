"""Signs that a CSV file has no header line. Then its first row is lost as names of columns.

Spark writes such files unless it is told otherwise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from elastic_dp.errors import DataError

_NAMES_SHOWN = 5
_WAY_OUT = 'write the files with a header line (Spark: option("header", True))'
NUMBERS = (
    "header lines of CSV files hold numbers, as rows do. If the first line is a row, it is lost as "
    f"names of columns: {_WAY_OUT}"
)


def has_numbers(names: Sequence[str]) -> bool:
    """Whether the names look like the values of a row. Those of years, or of columns that pandas
    counts from 0, do not."""
    numbers = [float(name) for name in names if _is_number(name)]
    ascending = all(one < other for one, other in pairwise(numbers))
    if not ascending or not all(map(float.is_integer, numbers)):
        return True
    return len(numbers) == len(names) <= 2 and numbers != list(range(len(numbers)))


class HeaderLines:
    """The header lines of the files of one data set. Files that are read as one have some column in
    common."""

    def __init__(self) -> None:
        self._first: dict[tuple[str, ...], str] = {}  # the first file of each header line

    def add(self, file: str, names: Sequence[str]) -> None:
        self._first.setdefault(tuple(names), file)

    def check(self) -> None:
        """Raises DataError for a file whose columns no other file has."""
        if len(self._first) < 2:
            return
        # Names that differ only in case are refused with a message of their own.
        files = Counter(name for names in self._first for name in {n.casefold() for n in names})
        for names, file in reversed(self._first.items()):
            if all(files[name.casefold()] == 1 for name in names):
                other = next(others for others in self._first if others != names)
                raise DataError(
                    f"{file} has no column that another file has: it has {_shown(names)}, and "
                    f"{self._first[other]} has {_shown(other)}. If their first lines are rows and "
                    f"not names, {_WAY_OUT}; if the files are several data sets, read them apart"
                )


def _is_number(name: str) -> bool:
    try:
        float(name)
    except ValueError:
        return False
    return "_" not in name and any(map(str.isdigit, name))


def _shown(names: Sequence[str]) -> str:
    more = ", …" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(map(repr, names[:_NAMES_SHOWN])) + more
