"""Where rows of CSV end: outside of quoted fields, by the rules of csv.py."""

from __future__ import annotations

import re
from functools import cache

import numpy as np
import numpy.typing as npt

from elastic_dp.data.formats.text import BYTE_ORDER_MARK

_Ints = npt.NDArray[np.int64]
_Bools = npt.NDArray[np.bool_]

_AT_ONCE = 1 << 17  # bytes that are looked at together: arrays for more are fresh memory each time


@cache
def quoted_or_row_end(delimiter: bytes) -> re.Pattern[bytes]:
    """Matches a quoted field, or a row end, which is group 1."""
    before = re.escape(delimiter)
    quoted = rb'"(?<![^' + before + rb'\r\n]")[^"]*+(?:""[^"]*+)*+(?:"|\Z)'
    return re.compile(quoted + rb"|(\r\n|\n|\r)")


class RowEnds:
    """Finds where rows end in a file that is given chunk by chunk: which quotes open a field, and
    which close it.

    A run of adjacent quotes acts as one. At a field's start, a run of odd length opens a quoted
    field, or closes the open one. Anywhere else, a run of odd length closes the open field, or is
    text. A run of even length changes nothing. So the state after a run is the parity of the odd
    runs at field starts since the last odd run elsewhere.
    """

    def __init__(self, delimiter: bytes = b",") -> None:
        self._before_field = delimiter + b"\r\n"
        # Indexed by the byte before a quote
        self._starts_field = np.zeros(256, dtype=np.bool_)
        self._starts_field[list(self._before_field)] = True
        self._may_open = self._starts_field.copy()
        self._may_open[ord('"')] = True
        self._quoted = False  # before the quotes at the end of `_tail`
        # The last byte that is not a quote; and one or two quotes, if an odd or an even number of
        # quotes follows it.
        self._tail = b"\n"

    @property
    def is_quoted(self) -> bool:
        """Whether the bytes so far end within a quoted field."""
        if len(self._tail) != 2:
            return self._quoted
        return not self._quoted and self._tail[:1] in self._before_field

    def last(self, content: bytes) -> int:
        """Like TextRows.last_row_end. A "\\r" at the end of `content` may be half of a line end,
        and ends no row yet."""
        before = self._quoted, self._tail
        last = 0
        for at in range(0, len(content), _AT_ONCE):
            if end := self._last(content[at : at + _AT_ONCE], ord("\n")):
                last = at + end
        if last or b"\r" not in content:
            return last
        self._quoted, self._tail = before
        return self._last(content, ord("\r"))

    def _last(self, content: bytes, mark: int) -> int:
        """Like `last`, for rows that end with `mark`."""
        if len(self._tail) == 1 and b'"' not in content:
            self._tail = content[-1:] or self._tail
            if self._quoted:
                return 0
            return content.rfind(b"\n") + 1 if mark == ord("\n") else _last_return(content)
        before = len(self._tail)
        whole = self._tail + content
        data = np.frombuffer(whole, np.uint8)
        pending = len(whole) - len(whole.rstrip(b'"'))
        quotes = np.flatnonzero(data == ord('"'))
        quotes = quotes[: len(quotes) - pending]
        at, states = self._states(data, quotes)
        end = _last_outside(whole, data, mark, at, states)
        self._quoted = bool(states[-1])
        rest = len(whole) - pending
        self._tail = whole[rest - 1 : rest] + b'"' * (pending and 2 - pending % 2)
        return max(0, end + 1 - before)

    def _states(self, data: npt.NDArray[np.uint8], quotes: _Ints) -> tuple[_Ints, _Bools]:
        """(indices of quotes [n], whether a quoted field is open [n + 1]: before the first of them,
        and after each)"""
        opening = quotes[int(self._quoted) :: 2]
        # Whether every second quote opens a field, or doubles the quote before it
        if self._may_open[data[opening - 1]].all():
            states = np.empty(len(quotes) + 1, dtype=np.bool_)
            states[0::2], states[1::2] = self._quoted, not self._quoted
            return quotes, states
        first = np.flatnonzero(np.diff(quotes, prepend=-2) != 1)
        starts = quotes[first]
        odd = np.diff(first, append=len(quotes)) % 2 == 1
        at_start = self._starts_field[data[starts - 1]]
        toggles = np.cumsum(odd & at_start)
        resets = np.maximum.accumulate(np.where(odd & ~at_start, np.arange(len(odd)), -1))
        known = np.where(resets >= 0, toggles[resets], -int(self._quoted))
        return starts, np.concatenate([[self._quoted], (toggles - known) % 2 == 1])


def _last_outside(
    whole: bytes, data: npt.NDArray[np.uint8], mark: int, at: _Ints, states: _Bools
) -> int:
    """The index of the last row end outside of quoted fields; -1 if there is none."""
    last = whole.rfind(b"\n") if mark == ord("\n") else -1
    if last >= 0 and not states[np.searchsorted(at, last)]:
        return last
    places = np.flatnonzero(data == mark)
    if mark == ord("\r"):
        places = places[places + 1 < len(data)]
        places = places[data[places + 1] != ord("\n")]
    outside = places[~states[np.searchsorted(at, places)]]
    return int(outside[-1]) if len(outside) else -1


def _last_return(content: bytes) -> int:
    """The index after the last "\\r", in content without "\\n". The last byte does not count: it
    may be half of "\\r\\n"."""
    return content.rfind(b"\r", 0, len(content) - 1) + 1


def header_end(content: bytes, delimiter: bytes) -> int:
    """The index after the first line that is not blank; 0 if there is none."""
    mark = len(BYTE_ORDER_MARK) if content.startswith(BYTE_ORDER_MARK) else 0
    body = content[mark:]
    row = 0
    for found in quoted_or_row_end(delimiter).finditer(body):
        if found[1] is None:
            continue
        if found.start() > row:
            return mark + found.end()
        row = found.end()
    return 0
