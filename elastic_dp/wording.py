"""Counts, lists, times and parts in sentences: "1 worker", "w1, w2, w3 …", "5 min", "12 %"."""

from collections.abc import Iterable
from difflib import get_close_matches
from itertools import islice

SHOWN = 5


def counted(number: int, one: str, many: str = "") -> str:
    """Return the number with its noun. `many` is the plural; by default `one` with an s.

    Example: `counted(2, "worker joins", "workers join")`.
    """
    return f"{number} {one if number == 1 else many or f'{one}s'}"


def first_few(words: Iterable[str]) -> str:
    """Return the first few words, separated by commas, since there may be thousands."""
    first = list(islice(words, SHOWN + 1))
    return ", ".join(first[:SHOWN]) + (" …" if first[SHOWN:] else "")


def duration(seconds: float) -> str:
    """Return a time in words: "0.4 s", "42 s", "5 min", "3 h 20 min", "2 d 4 h"."""
    if seconds < 10:
        return f"{max(0.0, seconds):.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min"
    return f"{hours // 24} d {hours % 24} h"


def share(part: float, whole: float) -> str:
    """Return a part in per cent: "0.2 %", "12 %"."""
    percent = 100 * part / whole if whole else 0.0
    return f"{percent:.1f} %" if 0 < percent < 10 else f"{percent:.0f} %"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return the question whether the most similar known word was meant, or nothing."""
    near = get_close_matches(word, list(known), n=1)
    return f". Did you mean {near[0]!r}?" if near else ""
