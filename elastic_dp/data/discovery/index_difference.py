"""Tells a user how a data set changed between two starts of a run."""

from __future__ import annotations

from collections.abc import Iterator

from elastic_dp.data.discovery.shard_index import Index

_CHUNK = 1 << 14  # shards whose names are converted to Python strings at the same time


def difference(old: Index, new: Index) -> str | None:
    """A message that names the shard or column in which the data sets differ; None if they are
    equal."""
    if old.digest == new.digest:
        return None
    if [s.weight for s in old.sources] != [s.weight for s in new.sources]:
        return f"the weights of the sources were {old.weights}, and are {new.weights}"
    if (old.tokens is None) != (new.tokens is None):
        was, now = ("not set" if one.tokens is None else "set" for one in (old, new))
        return f"pack was {was}, and is {now}"
    if old.columns != new.columns:
        return _columns_difference(dict(old.columns), dict(new.columns))
    if not old.shards["name"].equals(new.shards["name"]):
        return _names_difference(old, new)
    for column, word in (("size", "bytes"), ("check", "as its content's check")):
        differs = old.shards[column].to_numpy() != new.shards[column].to_numpy()
        if differs.any():
            shard = int(differs.argmax())
            was, now = old.shards[column][shard].as_py(), new.shards[column][shard].as_py()
            return f"shard {old.name(shard)} was rewritten: it had {was} {word}, and has {now}"
    return _groups_difference(old, new)


def _columns_difference(old: dict[str, str], new: dict[str, str]) -> str:
    for name in [*old, *new]:
        was, now = old.get(name, "not read"), new.get(name, "not read")
        if was != now:
            return f"column {name!r} was {was}, and is {now}"
    return f"the columns were in the order {list(old)}, and are in {list(new)}"


def _names_difference(old: Index, new: Index) -> str:
    was, now = ({(s, n) for s, n in _names(index)} for index in (old, new))
    gone, come = sorted(was - now), sorted(now - was)
    parts = [
        f"shard {names[0][1]}{f' and {len(names) - 1} more' if len(names) > 1 else ''} {word}"
        for names, word in ((gone, "is gone"), (come, "is new"))
        if names
    ]
    return ", ".join(parts) or "the sources are in another order"


def _names(index: Index) -> Iterator[tuple[int, str]]:
    for start in range(0, index.num_shards, _CHUNK):
        part = index.shards.slice(start, _CHUNK)
        yield from zip(part["source"].to_pylist(), part["name"].to_pylist(), strict=True)


def _groups_difference(old: Index, new: Index) -> str:
    """Names the first shard whose row groups differ."""
    for shard in range(old.num_shards):
        was, now = (
            tuple(
                array[index.group_bounds[shard] : index.group_bounds[shard + 1]].tolist()
                for array in (index.rows, index.starts, index.ends)
            )
            for index in (old, new)
        )
        if was != now:
            return (
                f"shard {old.name(shard)} was rewritten: it had {sum(was[0])} rows in "
                f"{len(was[0])} row "
                f"groups, and has {sum(now[0])} in {len(now[0])}, or they lie elsewhere in it"
            )
    return "the formats of the sources differ"
