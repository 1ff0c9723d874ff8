"""The sources of a data set: opens each URL, chooses its shards, and scans them."""

from __future__ import annotations

import itertools
import logging
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from elastic_dp.config import DataConfig
from elastic_dp.config.removed_names import REMOVED_FORMATS
from elastic_dp.data.block_source import Blocks
from elastic_dp.data.columns.schema import name_is_no_text
from elastic_dp.data.discovery.listing import (
    HIDDEN,
    Listing,
    list_files,
    skipped_message,
    why_nothing,
)
from elastic_dp.data.discovery.shard_index import prefix_of
from elastic_dp.data.formats import (
    ENDINGS,
    MAGIC_BYTES,
    content_of,
    format_of,
    format_of_content,
    open_format,
)
from elastic_dp.data.formats.file_format import FileFormat, Scan, ShardAt
from elastic_dp.errors import DataError, ElasticError
from elastic_dp.storage import Entry, Store

FOOTERS_IN_FLIGHT = 32
SCANS_IN_FLIGHT = 8
_NAMED = 3

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class OpenedSource:
    """A source whose shards are listed. `prefix`: before the names of its shards in messages."""

    store: Any  # a Store; None for a block source
    format: FileFormat
    root: str
    is_file: bool
    names: list[str]
    entries: list[Entry]
    prefix: str


def open_sources(config: DataConfig, timeout_s: float) -> list[OpenedSource]:
    """All sources are listed at once: a list of URLs may be one of a thousand files. Raises
    DataError for a source without shards."""
    urls = config.urls
    if (source := config.block_source) is not None:
        blocks = Blocks(source)
        entry = Entry(source.identity, max(1, int(blocks.numbers("stored_bytes").sum())), "")
        return [OpenedSource(None, blocks, "", True, [source.identity], [entry], prefix="")]
    is_list = not isinstance(config.url, str) or len(urls) > 1

    def open_one(url: str) -> OpenedSource:
        store = Store(url, config.storage_options, timeout_s=timeout_s)
        listing = list_files(url, store, in_list=is_list)
        chosen, entries = _shards_of(listing, store)
        _say_skipped(listing, store, entries)
        return OpenedSource(
            store=store,
            format=open_format(chosen),
            root=listing.root,
            is_file=listing.is_file,
            names=[listing.name(entry) for entry in entries],
            entries=entries,
            prefix=prefix_of(url, listing.is_file) if len(urls) > 1 else "",
        )

    threads = min(FOOTERS_IN_FLIGHT, len(urls))
    with ThreadPoolExecutor(threads, thread_name_prefix="elastic-dp-index") as pool:
        opened = list(pool.map(open_one, urls))
    if len(urls) > 1 and config.weights_by_step is None:
        _say_named_twice(opened, urls)
    return opened


def _say_named_twice(sources: Sequence[OpenedSource], urls: Sequence[str]) -> None:
    times = Counter(
        source.store.local_path(entry.path) or (*urlsplit(url)[:2], entry.path)
        for source, url in zip(sources, urls, strict=True)
        for entry in source.entries
    )
    if twice := [file for file, count in times.items() if count > 1]:
        names = [str(file if isinstance(file, str) else file[-1]) for file in twice]
        _log.warning(
            "DataConfig.url names %s more than once (%s): the rows come as often in each epoch",
            "1 shard" if len(names) == 1 else f"{len(names):,} shards",
            some(names),
        )


def _shards_of(listing: Listing, store: Store) -> tuple[str, list[Entry]]:
    """(format, its files). A file without a known ending that the URL names is known by its first
    bytes."""
    by_format: dict[str, list[Entry]] = {}
    for entry in listing.entries:
        if found := format_of(listing.name(entry)):
            by_format.setdefault(found, []).append(entry)
    if not by_format and (listing.is_file or listing.is_glob):
        for entry in listing.entries:
            first = bytes(store.read(entry.path, 0, min(entry.size, MAGIC_BYTES), entry.version))
            if found := format_of_content(first):
                by_format.setdefault(found, []).append(entry)
    if len(by_format) > 1:
        counted = " and ".join(
            f"{len(of)} {name} (such as {listing.name(of[0])})" for name, of in by_format.items()
        )
        raise DataError(
            f"DataConfig.url: {listing.url!r} holds shards of several formats: {counted}; name one "
            "by a glob such as '*.parquet'"
        )
    if not by_format:
        raise DataError(f"DataConfig.url: {_nothing(listing)}")
    return next(iter(by_format.items()))


def _nothing(listing: Listing) -> str:
    counts = Counter[str]()
    for entry in listing.entries:
        name = listing.name(entry)
        ending = next((e for e in REMOVED_FORMATS if name.lower().endswith(e)), "")
        if ending and name.rpartition("/")[2] != "index.json":
            counts[ending] += 1
    endings = [ending for each in ENDINGS.values() for ending in each]
    wanted = [ending for ending in endings if ending.count(".") == 1]
    if counts:
        ending, count = counts.most_common(1)[0]
        what, line = REMOVED_FORMATS[ending]
        files = f"{listing.url!r} is" if listing.is_file else f"{count:,} files there are"
        shown = listing.url if listing.is_file or listing.is_glob else f"{listing.url}/*{ending}"
        return (
            f"no shard at {listing.url!r}: {files} {what}, and training reads Parquet, Arrow IPC "
            f"and tar in place. Write {line.format(url=shown)}"
        )
    there = f"({', '.join(f'*{ending}' for ending in wanted)}) at {listing.url!r}"
    return f"no shard {there}: {why_nothing(listing)}"


def _say_skipped(listing: Listing, store: Store, entries: list[Entry]) -> None:
    """`_SUCCESS` and the like need no warning; another file, a folder or a hidden shard does."""
    skipped = listing.skipped(entries)
    if {*skipped} - {HIDDEN} or any(map(format_of, listing.hidden)):
        message = skipped_message(skipped)
        _log.warning("DataConfig.url: not read at %s: %s", store.url, message)
    elif skipped:
        _log.info("not read at %s: %s", store.url, skipped_message(skipped))
    if listing.folders:
        names = [f"{path[len(listing.root) :].lstrip('/')}/" for path in listing.folders]
        _log.warning(
            "DataConfig.url: not read at %s: %s (%s) with what lies below; '**' in place of the "
            "last name reads all of it",
            store.url,
            "1 folder" if len(names) == 1 else f"{len(names):,} folders",
            some(names),
        )


def some(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMED]) + (", …" if len(names) > _NAMED else "")


# ------------------------------------------------------------------------------------------ scans


def scan_all(
    sources: list[OpenedSource], columns: Sequence[str] | None
) -> Iterator[tuple[int, int, Scan]]:
    """(source, shard in it, scan) in order. Some scans run ahead; there is never a future for each
    shard of a large data set. `columns`: those that are read."""

    def scan(number: int, shard: int) -> Scan:
        source = sources[number]
        entry, name = source.entries[shard], source.prefix + source.names[shard]
        at = ShardAt(source.store, entry.path, entry.size, entry.version, name)
        return _scan_one(source.format, at, columns)

    slow = any(source.format.scans_content for source in sources)
    counts = [len(source.entries) for source in sources]
    ahead = min(SCANS_IN_FLIGHT if slow else FOOTERS_IN_FLIGHT, sum(counts))
    shards = ((number, shard) for number, count in enumerate(counts) for shard in range(count))
    waiting: deque[tuple[int, int, Future[Scan]]] = deque()
    pool = ThreadPoolExecutor(ahead, thread_name_prefix="elastic-dp-index")
    try:
        for place in itertools.islice(shards, 2 * ahead):
            waiting.append((*place, pool.submit(scan, *place)))
        while waiting:
            number, shard, future = waiting.popleft()
            yield number, shard, future.result()
            if (following := next(shards, None)) is not None:
                waiting.append((*following, pool.submit(scan, *following)))
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _scan_one(chosen: FileFormat, shard: ShardAt, columns: Sequence[str] | None) -> Scan:
    if shard.size == 0:
        raise DataError(
            f"{shard.name} is empty (0 bytes), which no {chosen.name} file is: a write to it was "
            "lost; write it again, or remove it from the data set"
        )
    try:
        return chosen.scan(shard, columns)
    except ElasticError:
        raise
    except UnicodeDecodeError as error:  # pyarrow's, of a footer
        raise name_is_no_text(shard.name, error) from error
    except Exception as error:  # a decoder may raise anything for damaged content
        first = bytes(shard.read(0, min(shard.size, MAGIC_BYTES)))
        what = content_of(first)
        if what and format_of_content(first) != chosen.name:
            raise DataError(
                f"{shard.name} is not {chosen.name}, as its name says: by its first bytes it is "
                f"{what}"
            ) from error
        place = "scan" if chosen.scans_content else "read the footer of"
        raise DataError(f"cannot {place} {shard.name}: {type(error).__name__}: {error}") from error
