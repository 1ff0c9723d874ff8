"""Compares MDS shards with the `index.json` that MosaicML Streaming writes beside them, last.

Shards describe themselves, so the index is not needed to read them. But it alone says which files
are part of the data set: a shard that is missing, cut off, or left by another writer shows here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping

from elastic_dp.errors import DataError

INDEX = "index.json"
_NAMES = 3
_AGAIN = "copy the whole folder again, or write it again"


def refuse_other_shards(
    sizes: Mapping[str, int],
    indexes: Iterable[str],
    read: Callable[[str], bytes],
    is_wanted: Callable[[str], object],
    is_folder: bool,
) -> None:
    """Raises DataError if the shards are not those that the indexes name.

    `sizes`: the bytes of each shard, by path. `indexes`: the paths of the `index.json` there.
    `is_wanted(path)`: whether the file would be among `sizes` if it existed. `is_folder`: the URL
    names a folder, which then must have an index.
    """
    indexes = sorted(indexes)
    if not indexes:
        if is_folder:
            raise DataError(
                f"MDS shards without {INDEX}, which is written last: their writer has not "
                f"finished, or the copy is not complete; {_AGAIN}. A glob such as '*.mds' reads "
                "them without it"
            )
        return
    named: set[str] = set()
    for index in indexes:
        root = index.removesuffix(INDEX)
        for raw, packed in _shards(index, read(index)):
            both = [(root + name, size) for name, size in (raw, packed) if name]
            named.update(path for path, _ in both)
            there = [(path, size) for path, size in both if path in sizes]
            if len(there) > 1:
                raise DataError(
                    f"{there[0][0]} and {there[1][0]} are the same rows; remove one of them, or "
                    "name the others by a glob such as '*.mds'"
                )
            if not there and any(is_wanted(path) for path, _ in both):
                raise DataError(
                    f"{index} names {both[-1][0].removeprefix(root)}, which is not there or is "
                    f"not read; {_AGAIN}"
                )
            for path, size in there:
                if sizes[path] != size:
                    raise DataError(
                        f"{path} has {sizes[path]:,} bytes, and {index} says {size:,}: it was cut "
                        f"off or written again; {_AGAIN}"
                    )
    if others := sorted(sizes.keys() - named):
        some = ", ".join(others[:_NAMES]) + (", …" if len(others) > _NAMES else "")
        raise DataError(
            f"{indexes[0]} does not name {some}, so whether their rows are part of the data set is "
            "not known; remove them, or name the shards by a list of files"
        )


def _shards(index: str, content: bytes) -> list[tuple[tuple[str, int], tuple[str, int]]]:
    """((name, bytes) of the shard, the same of the compressed one) for each shard; the name is ""
    where there is none."""
    try:
        found = json.loads(content)
        if found["version"] != 2:
            raise ValueError(f"version {found['version']}")
        for shard in found["shards"]:
            if shard["format"] != "mds":
                raise ValueError(f"shards of the format {shard['format']!r}")
        files = [
            [shard[key] or {} for key in ("raw_data", "zip_data")] for shard in found["shards"]
        ]
        return [
            (
                (str(raw.get("basename", "")), int(raw.get("bytes", 0))),
                (str(packed.get("basename", "")), int(packed.get("bytes", 0))),
            )
            for raw, packed in files
        ]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{index} is not an index of MDS shards: {error!r}") from None
