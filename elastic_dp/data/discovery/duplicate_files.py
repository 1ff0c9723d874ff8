"""Finds files that are listed under several names, so that their rows count several times."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from elastic_dp.storage import Entry

_NAMED = 3


class ListedFiles(NamedTuple):
    """Files of a source. `name(number)`: for messages. `place(path)`: equal for two names of one
    file. Both are called for few files."""

    entries: Sequence[Entry]
    name: Callable[[int], str]
    place: Callable[[str], object]


def duplicate_files(sources: Iterable[ListedFiles]) -> str:
    """What is said of files with several names, also through links; "" if there are none."""
    sources = list(sources)
    count = sum(len(source.entries) for source in sources)
    each = (_facts(entry) for source in sources for entry in source.entries)
    values, counts = np.unique(np.fromiter(each, np.int64, count), return_counts=True)
    several = set(values[counts > 1].tolist())
    places: dict[object, list[str]] = {}
    for source in sources if several else ():
        for number, entry in enumerate(source.entries):
            if _facts(entry) in several:
                places.setdefault(source.place(entry.path), []).append(source.name(number))
    twice = [names for names in places.values() if len(names) > 1]
    if not twice:
        return ""
    some = "; ".join(" and ".join(dict.fromkeys(names)) for names in twice[:_NAMED])
    more = "; …" if len(twice) > _NAMED else ""
    files = "1 file is" if len(twice) == 1 else f"{len(twice):,} files are"
    return (
        f"{files} read several times, and the rows count as often: {some}{more}. Name each file "
        "once, and no link beside what it leads to"
    )


def local_place(path: str) -> object:
    """Equal for two names of one local file."""
    try:
        found = os.stat(path)
    except OSError:  # removed meanwhile; reading it reports that
        return path
    return found.st_dev, found.st_ino


def _facts(entry: Entry) -> int:
    """Equal for one file under several names, and seldom for two files. A number takes little
    memory for a million files."""
    return hash((entry.size, entry.version))
