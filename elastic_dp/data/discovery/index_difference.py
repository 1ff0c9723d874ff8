"""Tells a user how a data set changed between two starts of a run."""

from __future__ import annotations

from elastic_dp.data.discovery.shard_index import Index


def difference(old: Index, new: Index) -> str | None:
    """A message that names the shard or column in which the data sets differ; None if they are
    equal."""
    if old.digest == new.digest:
        return None
    if old.weights != new.weights:
        return f"the weights of the sources were {old.weights}, and are {new.weights}"
    if (old.tokens is None) != (new.tokens is None):
        was, now = ("not set" if one.tokens is None else "set" for one in (old, new))
        return f"pack was {was}, and is {now}"
    then, there = dict(old.columns), dict(new.columns)
    for name in [*then, *there]:
        was, now = then.get(name, "not read"), there.get(name, "not read")
        if was != now:
            return f"column {name!r} was {was}, and is {now}"
    if [*then] != [*there]:
        return f"the columns were in the order {[*then]}, and are in {[*there]}"
    if not old.shards["name"].equals(new.shards["name"]):
        return _names_difference(old, new)
    for column, word in (("size", "bytes"), ("check", "as its content's check")):
        differs = old.shards[column].to_numpy() != new.shards[column].to_numpy()
        if differs.any():
            shard = int(differs.argmax())
            was, now = old.shards[column][shard].as_py(), new.shards[column][shard].as_py()
            return f"shard {old.name(shard)} was rewritten: it had {was} {word}, and has {now}"
    if old.selection != new.selection:
        return "the filter keeps other rows"
    if len(old.sources) != len(new.sources):
        return f"DataConfig.url named {len(old.sources)} sources, and names {len(new.sources)}"
    return "the formats or the sources differ"


def _names_difference(old: Index, new: Index) -> str:
    was, now = (
        set(zip(one.shards["source"].to_pylist(), one.shards["name"].to_pylist(), strict=True))
        for one in (old, new)
    )
    parts = [
        f"shard {names[0][1]}{f' and {len(names) - 1} more' if len(names) > 1 else ''} {word}"
        for names, word in ((sorted(was - now), "is gone"), (sorted(now - was), "is new"))
        if names
    ]
    return ", ".join(parts) or "the sources are in another order"
