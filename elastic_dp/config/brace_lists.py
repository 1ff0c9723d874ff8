"""Brace lists in URLs, as a shell and webdataset have them: `part-{000..010}.tar`, `{a,b}.csv`.

A range counts from its first number to its last one, up or down; a bound that begins with a zero
sets the number of digits. `[{]` stands for the character itself, as in a glob.
"""

from __future__ import annotations

import re

from elastic_dp.errors import SpecError
from elastic_dp.urls import redact_url

MAX_URLS = 100_000
_LIST = re.compile(r"(?<!\[)\{(?:(\d+)\.\.(\d+)|([^{},]*(?:,[^{},]*)+))\}")
_NESTED = re.compile(r"(?<!\[)\{[^{}]*\{")


def expand_braces(url: str) -> list[str]:
    """The URLs that `url` stands for, in order; itself if it has no brace list. Raises SpecError
    for lists inside each other, and for more than `MAX_URLS`."""
    if "{" not in url:
        return [url]
    expanded, rest = [""], 0
    for found in _LIST.finditer(url):
        if _NESTED.search(url):
            raise SpecError(
                f"DataConfig.url: {redact_url(url)!r} has brace lists inside each other; name the "
                "URLs in a list"
            )
        words = _words(found)
        if len(expanded) * len(words) > MAX_URLS:
            raise SpecError(
                f"DataConfig.url: {redact_url(url)!r} stands for more than {MAX_URLS:,} URLs; use "
                "a glob"
            )
        before = url[rest : found.start()]
        expanded = [start + before + word for start in expanded for word in words]
        rest = found.end()
    return [start + url[rest:] for start in expanded]


def _words(found: re.Match[str]) -> list[str]:
    if found[3] is not None:
        return found[3].split(",")
    first, last = int(found[1]), int(found[2])
    last = min(max(last, first - MAX_URLS), first + MAX_URLS)  # more is refused by the caller
    bounds = (found[1], found[2])
    padded = any(bound.startswith("0") and len(bound) > 1 for bound in bounds)
    digits = max(map(len, bounds)) if padded else 0
    step = 1 if last >= first else -1
    return [f"{number:0{digits}}" for number in range(first, last + step, step)]
