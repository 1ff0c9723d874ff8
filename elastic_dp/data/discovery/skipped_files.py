"""Counts files that are in the folder of a data set but are not read, by ending, to report them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

_EXAMPLES = 3
_ENDINGS = 6  # endings that a message names
HIDDEN = "hidden"
NO_ROWS = "without a row"
_LABELS = {"": "without an ending", HIDDEN: "hidden by a leading '.' or '_'"}


@dataclass(frozen=True)
class Skipped:
    """Files that are not read. `ending`: such as ".py"; "" for names without one; "hidden" for
    names that begin with "." or "_"; or another reason. `files`: their number. `examples`: the
    first names, at most three."""

    ending: str
    files: int
    examples: tuple[str, ...]


def count_skipped(
    names: Iterable[str],
    hidden: Sequence[str] = (),
    reasons: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> tuple[Skipped, ...]:
    """Counts `names` and `hidden` by ending, the most frequent ending first. `reasons`: names that
    are skipped for another reason, by that reason."""
    found: dict[str, list[str]] = {}
    for name in names:
        file = name.rpartition("/")[2]
        ending = f".{file.rpartition('.')[2].lower()}" if "." in file else ""
        found.setdefault(ending, []).append(name)
    if hidden:
        found[HIDDEN] = list(hidden)
    found |= {reason: list(those) for reason, those in reasons.items() if those}
    counted = [Skipped(key, len(of), tuple(sorted(of)[:_EXAMPLES])) for key, of in found.items()]
    return tuple(sorted(counted, key=lambda one: (-one.files, one.ending)))


def skipped_message(skipped: Sequence[Skipped]) -> str:
    """A message of one line."""
    total = sum(one.files for one in skipped)
    words = [
        f"{one.files:,} {_LABELS.get(one.ending, one.ending)} (such as {one.examples[0]})"
        for one in skipped[:_ENDINGS]
    ]
    more = [f"{len(skipped) - _ENDINGS} more endings"] if len(skipped) > _ENDINGS else []
    return f"{total:,} file{'s' * (total != 1)}: {', '.join([*words, *more])}"
