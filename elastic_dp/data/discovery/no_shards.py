"""Explains why there is no shard at a URL, and what to do. Each cause has a message of its own."""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Iterable, Sequence

from elastic_dp.data.discovery.skipped_files import Skipped, skipped_message
from elastic_dp.data.formats.litdata_index import is_chunk
from elastic_dp.storage import Entry, FolderListing, Store

_LOOKS = 16  # folders that are listed to find an example
_PARTITION = re.compile(r"[^/=]+=[^/]*")


def why_no_shard(
    shown: str,
    store: Store,
    folder: str,
    look: FolderListing,
    *,
    skipped: Sequence[Skipped],
    is_glob: bool,
    is_shard: IsShard,
    given_format: str | None,
) -> str:
    """The cause, and what to do. `shown`: the URL without secrets. `look`: the listing of `folder`,
    which has no shard. `skipped`: files that match the URL and are not read."""
    base = shown_folder(shown, store.path, folder)
    if not look.entries and not look.folders and not look.unreadable:
        return _empty(shown, store, folder, base)
    below = _first_below(store, look.folders, is_shard)
    if below is not None:
        return _subfolders(base, folder, below)
    if is_glob and not skipped:
        some = _some(
            base, [e.path for e in look.entries] + [f"{path}/" for path in look.folders], folder
        )
        return f"no file matches the pattern; {some}. Correct the pattern"
    if skipped and all(one.ending == "hidden" for one in skipped):
        return (
            f"only {skipped_message(skipped)}. Names that begin with '.' or '_' are files that "
            "are not finished, or notes "
            "of the program that wrote them; rename them if they are shards"
        )
    if skipped and not any(one.ending == "" or one.ending.startswith(".") for one in skipped):
        return (
            f"nothing there can be read: {skipped_message(skipped)}. Correct the links, or rename "
            "the keys"
        )
    if skipped:
        words = f"none of the files has such an ending: {skipped_message(skipped)}"
        if given_format is not None:
            return (
                f"{words}. Name the files by a glob, and those that match are read as "
                "DataConfig.format says"
            )
        return (
            f"{words}. Where they are of one of these formats, name them by a glob, such as "
            f"'{base}*', and set "
            "DataConfig.format; `elastic-dp data convert` makes shards of images and text"
        )
    if all(map(_is_hidden, look.folders)):
        hidden = _some(base, [f"{path}/" for path in look.folders], folder)
        return f"{hidden}. Names that begin with '.' or '_' are not read"
    subfolders = _some(base, [f"{path}/" for path in look.folders], folder)
    return (
        f"{subfolders}, and no shard was found in {_LOOKS} of the folders below; name the one "
        "that has them"
    )


class IsShard:
    """Whether a path below a folder would be read as a shard."""

    def __init__(self, has_format: Iterable[str]) -> None:
        self._endings = tuple(has_format)

    def __call__(self, path: str) -> bool:
        lower = path.lower()
        is_named = lower.endswith(self._endings) and (not lower.endswith(".bin") or is_chunk(lower))
        return is_named and not _is_hidden(path)


def shown_folder(shown: str, path: str, folder: str) -> str:
    """The URL of `folder`, with a "/" at the end. `shown`: the URL of `path`."""
    shown, path, inside = shown.rstrip("/"), path.rstrip("/"), folder.strip("/")
    if not path:
        return f"{shown}/{inside}/" if inside else f"{shown}/"
    base = shown.removesuffix(path) if shown.endswith(path) else ""
    return base + (folder.rstrip("/") + "/" if inside else "")


def _empty(shown: str, store: Store, folder: str, base: str) -> str:
    local = store.local_path(folder or "/")
    if local is not None and os.path.isdir(local):
        which = "the folder" if base.rstrip("/") == shown.rstrip("/") else f"the folder {base!r}"
        return f"{which} is empty"
    itself = store.local_path(store.path)
    if itself is not None and os.path.isfile(itself):
        return (
            "it is a file without such an ending; rename it as its format is named here, with .gz, "
            ".zst, .bz2 or .lz4 behind that if it is compressed, or, if it is not compressed, say "
            "by DataConfig.format what it is"
        )
    if itself is not None and os.path.islink(itself):
        return f"it is a link to {os.readlink(itself)!r}, where nothing is"
    if local is not None:
        return (
            "there is no such file or folder; look at its spelling, and whether it is mounted on "
            "this machine"
        )
    return (
        "there is no object of that name or below it; look at the spelling of the bucket and the "
        "folder"
    )


def _subfolders(base: str, folder: str, below: Entry) -> str:
    name = below.path.removeprefix(folder).lstrip("/")
    ending = name.rpartition("/")[2]
    ending = ending[ending.find(".") :] if "." in ending else ""
    keys = [part.partition("=")[0] for part in name.split("/")[:-1] if _PARTITION.fullmatch(part)]
    more = (
        f", all of them, and '{base}{name.rpartition('/')[0]}' those of one folder, as of a split"
    )
    if keys:
        more = (
            f", with the column{'s' * (len(keys) > 1)} {', '.join(map(repr, keys))} from the names "
            "of the folders"
        )
    return (
        f"the shards lie in its subfolders, such as {name}. '{base}**/*{_last(ending)}' reads "
        f"them{more}"
    )


def _last(ending: str) -> str:
    """ ".parquet" of ".snappy.parquet", ".csv.gz" of ".csv.gz"."""
    parts = ending.split(".")
    packed = parts[-1] in ("gz", "zst", "bz2", "lz4")
    return "." + ".".join(parts[-2:] if packed else parts[-1:])


def _first_below(store: Store, folders: Sequence[str], is_shard: IsShard) -> Entry | None:
    waiting = deque(folders)
    for _ in range(_LOOKS):
        if not waiting:
            return None
        folder = waiting.popleft()
        if _is_hidden(folder):
            continue
        look = store.look(folder, deep=False)
        if found := next((entry for entry in look.entries if is_shard(entry.path)), None):
            return found
        waiting.extend(look.folders)
    return None


def _is_hidden(path: str) -> bool:
    return path.rpartition("/")[2][:1] in (".", "_")


def _some(base: str, paths: Sequence[str], folder: str) -> str:
    names = sorted(path.removeprefix(folder).lstrip("/") for path in paths)
    more = ", …" if len(names) > 3 else ""
    return (
        f"{base!r} holds {len(names):,} other name{'s' * (len(names) > 1)}: "
        f"{', '.join(names[:3])}{more}"
    )
