"""Counts and lists in sentences: "1 worker", "2 workers", "w1, w2, w3 …"."""

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


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return the question whether the most similar known word was meant, or nothing."""
    near = get_close_matches(word, list(known), n=1)
    return f". Did you mean {near[0]!r}?" if near else ""
