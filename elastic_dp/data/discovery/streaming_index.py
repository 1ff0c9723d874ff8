"""Compares shards with the `index.json` that their writer puts beside them, last: MDS shards of
MosaicML Streaming, and chunks of litdata.

The index alone says which files are part of the data set: a shard that is missing, cut off, or left
by another writer shows here. MDS shards describe themselves, so they can be read without it; what
is in litdata's chunks only the index says.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping

from elastic_dp.data.formats.litdata_index import INDEX, LitDataIndex, is_packed
from elastic_dp.errors import DataError

_NAMES = 3
_AGAIN = "copy the whole folder again, or write it again"


# (name, the sizes that it may have) of a shard, and the same of the compressed one; "" for none
_Named = tuple[tuple[str, tuple[int, ...]], tuple[str, tuple[int, ...]]]


def refuse_other_shards(
    chosen: str,
    sizes: Mapping[str, int],
    indexes: Iterable[str],
    read: Callable[[str], bytes],
    is_wanted: Callable[[str], object],
    is_folder: bool,
) -> None:
    """Raises DataError if the shards are not those that the indexes name.

    `chosen`: the format, "mds" or "litdata". `sizes`: the bytes of each shard, by path. `indexes`:
    the paths of the `index.json` there. `is_wanted(path)`: whether the file would be among `sizes`
    if it existed. `is_folder`: the URL names a folder, which then must have an index.
    """
    indexes = sorted(indexes)
    if not indexes:
        if is_folder:
            what = "MDS shards" if chosen == "mds" else "chunks of litdata"
            without = ". A glob such as '*.mds' reads them without it" if chosen == "mds" else ""
            raise DataError(
                f"{what} without {INDEX}, which is written last: their writer has not finished, or "
                f"the copy is not complete; {_AGAIN}{without}"
            )
        return
    named: set[str] = set()
    for index in indexes:
        root = index.removesuffix(INDEX)
        of = _mds_shards if chosen == "mds" else _litdata_chunks
        for raw, packed in of(index, read(index)):
            both = [(root + name, fit) for name, fit in (raw, packed) if name]
            named.update(path for path, _ in both)
            there = [(path, fit) for path, fit in both if path in sizes]
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
            for path, fit in there:
                if fit and sizes[path] not in fit:
                    raise DataError(
                        f"{path} has {sizes[path]:,} bytes, and {index} says {fit[0]:,}: it was "
                        f"cut off or written again; {_AGAIN}"
                    )
    if others := sorted(sizes.keys() - named):
        some = ", ".join(others[:_NAMES]) + (", …" if len(others) > _NAMES else "")
        raise DataError(
            f"{indexes[0]} does not name {some}, so whether their rows are part of the data set is "
            "not known; remove them, or name the shards by a list of files"
        )


def _mds_shards(index: str, content: bytes) -> list[_Named]:
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
                (str(raw.get("basename", "")), (int(raw.get("bytes", 0)),)),
                (str(packed.get("basename", "")), (int(packed.get("bytes", 0)),)),
            )
            for raw, packed in files
        ]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{index} is not an index of MDS shards: {error!r}") from None


def _litdata_chunks(index: str, content: bytes) -> list[_Named]:
    """The sizes of compressed chunks are not in the index: their content is compared later."""
    found = LitDataIndex.of(content, index)
    return [
        ((name, () if is_packed(name) else facts.sizes()), ("", ()))
        for name, facts in found.chunks.items()
    ]
