"""Scans the shards of all sources, some ahead, so that the index is made of them in order."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from elastic_dp.config import DataConfig
from elastic_dp.data.discovery.opened_source import FOOTERS_IN_FLIGHT, OpenedSource
from elastic_dp.data.formats.csv import Csv
from elastic_dp.data.formats.file_format import FileFormat, Scan, ShardAt
from elastic_dp.data.formats.jsonl import JsonLines
from elastic_dp.data.formats.lfs_pointer import POINTER_BYTES, refuse_pointer
from elastic_dp.data.formats.litdata import LitData
from elastic_dp.data.formats.mds import Mds
from elastic_dp.data.formats.text import is_compressed
from elastic_dp.errors import DataError, ElasticError

SCANS_IN_FLIGHT = 8
_MAY_BE_BLANK = (Csv, JsonLines)  # formats in which a file of 0 bytes is one without rows


def announce(source: OpenedSource, say: Callable[[str], None]) -> None:
    if source.format.scans_content:
        entries = source.listed.entries
        mib = sum(entry.size for entry in entries) / (1 << 20)
        say(f"scanning {len(entries)} {source.format.name} shard(s), {mib:,.0f} MiB, once")


def scan_all(
    sources: list[OpenedSource], config: DataConfig, used: Sequence[str] = ()
) -> Iterator[tuple[int, int, Scan]]:
    """(source, shard in it, scan) in order. Some scans run ahead; there is never a future for each
    shard of a large data set. `used`: the columns of the filter, which are read too."""

    wanted = config.columns_by_source or (config.columns,) * len(sources)
    columns = [None if of is None else list(dict.fromkeys([*of, *used])) for of in wanted]

    def scan(number: int, shard: int) -> Scan:
        source = sources[number]
        entry, name = source.listed.entries[shard], source.prefix + source.listed.name(shard)
        at = ShardAt(source.store, entry.path, entry.size, entry.version, name)
        return _scan_one(source.format, at, columns[number])

    slow = any(source.format.scans_content for source in sources)
    counts = [len(source.listed.entries) for source in sources]
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
    if shard.size == 0 and not (isinstance(chosen, _MAY_BE_BLANK) and not is_compressed(shard)):
        raise DataError(
            f"{shard.name} is empty (0 bytes), which no {chosen.name} file is: a write to it "
            "was lost; write it again, or "
            "remove it from the data set"
        )
    try:
        found = chosen.scan(shard, columns)
    except ElasticError:
        raise
    except Exception as error:  # a decoder may raise anything for damaged content
        if shard.size < POINTER_BYTES:
            refuse_pointer(shard.name, bytes(shard.read(0, shard.size)))
        place = "header" if isinstance(chosen, Mds | LitData) else "footer"
        what = "scan" if chosen.scans_content else f"read the {place} of"
        raise DataError(f"cannot {what} {shard.name}: {type(error).__name__}: {error}") from error
    return found
