"""Folders of Hugging Face `datasets`, which also hold cached results.

`load_from_disk(folder).map(...)` and `.filter(...)` write their results as `cache-….arrow` into the
folder that they read, also into the cache of `load_dataset`. Such a file repeats rows, or holds
their numbers, and is no part of the data set. `state.json`, which `save_to_disk` writes, names the
files that are. Where it is missing, results are known by their names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable

from elastic_dp.errors import DataError

STATE, INFO = "state.json", "dataset_info.json"
CACHED = "cached results of Hugging Face datasets"
_CACHE = re.compile(r"cache-[0-9a-f]{16}(_\d+_of_\d+)?\.arrow")
_NAMES = 3


def named_files(content: bytes) -> tuple[str, ...]:
    """The names of the data files, in the order of the rows. `content`: of state.json."""
    try:
        state = json.loads(content)
        names = tuple(file["filename"] for file in state["_data_files"])
        indices = state.get("_indices_data_files")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"state.json is not what datasets.save_to_disk writes: {error!r}") from None
    if indices:  # by versions of `datasets` before 2.0
        raise DataError(
            "state.json names files of indices, which choose the rows that belong to the data set, "
            "and they would be ignored. Save it with a newer version of `datasets`: "
            "load_from_disk(folder).flatten_indices().save_to_disk(another_folder)"
        )
    return names


def cached_results(
    paths: Iterable[str],
    has: Callable[[str], bool],
    read: Callable[[str], bytes],
    is_wanted: Callable[[str], object] = lambda path: True,
) -> set[str]:
    """Those of the Arrow files `paths` that are cached results. Where a folder has nothing but
    results among `paths`, the user named them, and they are read.

    `has(path)`, `read(path)`: of STATE or INFO in a folder. `is_wanted(path)`: whether the file
    would be among `paths` if it existed. Raises DataError if a wanted file that state.json names is
    missing.
    """
    inside: dict[str, dict[str, str]] = {}
    for path in paths:
        folder, mark, name = path.rpartition("/")
        inside.setdefault(folder + mark, {})[name] = path
    found: set[str] = set()
    for folder, there in inside.items():
        if not has(folder + INFO):
            continue
        if has(folder + STATE):
            named = set(named_files(read(folder + STATE)))
            lost = sorted(n for n in named - there.keys() if is_wanted(folder + n))
            if lost:
                some = ", ".join(map(repr, lost[:_NAMES])) + (", …" if len(lost) > _NAMES else "")
                raise DataError(
                    f"{folder}state.json names {some}, which is no file of this folder; copy the "
                    "whole folder again"
                )
            results = {path for name, path in there.items() if name not in named}
        else:
            results = {path for name, path in there.items() if is_cached_result(name)}
        if len(results) < len(there):
            found |= results
    return found


def is_cached_result(name: str) -> bool:
    """Whether `datasets` gives this name to a result."""
    return _CACHE.fullmatch(name) is not None
