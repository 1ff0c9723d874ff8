"""Parquet shards in a far store, compared with hand-written prefetch loops over obstore.

All read the bytes of `token_rows.many` with as many requests in flight, and decode with the same
pyarrow call. The loops know the footers and the range of each row group before they start. They
copy batches of 64 rows into one fixed buffer, and limit no memory.

- `threads` fetches and decodes in a pool; `asyncio` fetches in an event loop and decodes in two
  threads. Both are in file order.
- `shuffling` is `asyncio` with row groups in random order, and rows at random within `MIXED` row
  groups at a time: a plainer shuffle than ours.

Ours is measured from opening to the last tensor, and compared in the same rounds: in order with the
faster loop in file order, shuffled with the loop that shuffles, and with one that does not.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks import token_rows
from benchmarks.data_local import VIRTUAL_WORKERS, opening, take_all
from benchmarks.report import median_interval, ratio
from benchmarks.slow_store import BUCKET, serving
from elastic_dp.data.pipeline.row_groups import READ_THREADS

SHAPES = {"20 ms": None, "20 ms, 90 MB/s per connection": 90e6}
LATENCY_S = 0.02
TARGETS = {"in order": 0.95, "shuffled": 0.9}
LOOPS_IN_ORDER = ("loop, threads", "loop, asyncio")
MIXED = 8 * VIRTUAL_WORKERS  # row groups; ours goes by their bytes, and may have fewer open


@dataclass(frozen=True)
class Planned:
    """A row group that a loop will read."""

    key: str
    footer: pq.FileMetaData
    group: int
    start: int
    end: int


def measure(folder: Path, rounds: int) -> dict[str, Any]:
    return token_rows.alone("benchmarks.data_store", folder, rounds)


def compare_all(folder: Path, rounds: int) -> dict[str, Any]:
    many = token_rows.many(folder)
    found: dict[str, Any] = {"requests_in_flight": READ_THREADS, "rows": token_rows.MANY_ROWS}
    for name, bytes_per_s in SHAPES.items():
        with serving(many, latency_s=LATENCY_S, bytes_per_s=bytes_per_s) as url:
            found[name] = compare(many, url, rounds)
    return found


def compare(folder: Path, url: str, rounds: int) -> dict[str, Any]:
    planned = plan(folder)
    systems: dict[str, Callable[[], int]] = {
        "loop, threads": lambda: by_threads(url, planned),
        "loop, asyncio": lambda: asyncio.run(by_asyncio(url, planned)),
        "in order": ours(url, "none"),
        "loop, shuffling": lambda: asyncio.run(by_shuffling(url, planned)),
        "shuffled": ours(url, "rows"),
    }
    speeds: dict[str, list[float]] = {name: [] for name in systems}
    for _ in range(1 + rounds):
        for name, system in systems.items():
            begun_at = time.perf_counter()
            count = system()
            assert count == token_rows.MANY_ROWS, f"{count} rows came"
            speeds[name].append(count / (time.perf_counter() - begun_at))
    for values in speeds.values():
        del values[0]  # the first round opens what stays open
    report: dict[str, Any] = {
        name: {"rows_per_s": round(median_interval(values)[0])} for name, values in speeds.items()
    }
    best = max(LOOPS_IN_ORDER, key=lambda name: median_interval(speeds[name])[0])
    report["in order"] |= ratio(speeds["in order"], speeds[best]) | {"beside": best}
    report["shuffled"] |= ratio(speeds["shuffled"], speeds["loop, shuffling"])
    report["shuffled"]["beside loops in file order"] = ratio(speeds["shuffled"], speeds[best])
    for name, target in TARGETS.items():
        report[name]["target"] = target
    return report


def plan(folder: Path) -> list[Planned]:
    found = []
    for path in sorted((folder / "parquet").iterdir()):
        footer = pq.read_metadata(path)
        for number in range(footer.num_row_groups):
            chunk = footer.row_group(number).column(0)
            start = chunk.data_page_offset
            end = start + chunk.total_compressed_size
            found.append(Planned(f"parquet/{path.name}", footer, number, start, end))
    return found


def ours(url: str, shuffle: Literal["none", "rows"]) -> Callable[[], int]:
    """One epoch, from opening to the last tensor; footers are read again in workers."""
    options = {"access_key_id": "k", "secret_access_key": "s", "endpoint": url}
    opened = opening(f"s3://{BUCKET}/parquet", shuffle, **options)

    def epoch() -> int:
        with opened() as data:
            return take_all(data)

    return epoch


def by_threads(url: str, planned: list[Planned]) -> int:
    import obstore

    store = open_store(url)

    def read(one: Planned) -> token_rows.Tokens:
        return decode(one, obstore.get_range(store, one.key, start=one.start, end=one.end))

    with ThreadPoolExecutor(READ_THREADS) as pool:
        return token_rows.copy_batches(pool.map(read, planned))


async def by_asyncio(url: str, planned: list[Planned]) -> int:
    batch = np.empty((token_rows.BATCH, token_rows.LENGTH), dtype=np.int32)
    return sum([token_rows.copy_rows(rows, batch) async for rows in fetched(url, planned)])


async def by_shuffling(url: str, planned: list[Planned]) -> int:
    random, count, mixed = np.random.default_rng(1), 0, list[token_rows.Tokens]()
    shuffled = [planned[i] for i in random.permutation(len(planned))]
    batch = np.empty((token_rows.BATCH, token_rows.LENGTH), dtype=np.int32)
    async for rows in fetched(url, shuffled):
        mixed.append(rows)
        count += len(rows)
        if len(mixed) == MIXED or count == token_rows.MANY_ROWS:
            shuffle_out(mixed, random, batch)
            mixed.clear()
            await asyncio.sleep(0)
    return count


def shuffle_out(
    mixed: list[token_rows.Tokens], random: np.random.Generator, batch: token_rows.Tokens
) -> None:
    rows = np.concatenate(mixed)
    order = random.permutation(len(rows))
    for start in range(0, len(rows), token_rows.BATCH):
        part = order[start : start + token_rows.BATCH]
        np.take(rows, part, axis=0, out=batch[: len(part)], mode="clip")


async def fetched(url: str, planned: list[Planned]) -> AsyncIterator[token_rows.Tokens]:
    """Row groups, decoded, in the order of `planned`."""
    import obstore

    store, loop = open_store(url), asyncio.get_running_loop()
    in_flight = asyncio.Semaphore(READ_THREADS)
    with ThreadPoolExecutor(2) as pool:

        async def read(one: Planned) -> token_rows.Tokens:
            async with in_flight:
                content = await obstore.get_range_async(
                    store, one.key, start=one.start, end=one.end
                )
            return await loop.run_in_executor(pool, decode, one, content)

        tasks = [asyncio.create_task(read(one)) for one in planned]
        while tasks:
            yield await tasks.pop(0)


def open_store(url: str) -> Any:
    from obstore.store import S3Store

    return S3Store(
        BUCKET,
        config={"endpoint": url, "access_key_id": "k", "secret_access_key": "s"},
        client_options={"allow_http": True},
    )


def decode(one: Planned, content: Any) -> token_rows.Tokens:
    held = pa.PythonFile(_Range(one.start, one.end, memoryview(content)), mode="r")
    file = pq.ParquetFile(held, metadata=one.footer)
    table = file.read_row_group(one.group, use_threads=False)
    return token_rows.rows_of(table.column(0).chunk(0))


class _Range:
    """Bytes of a file from `start` to `end`, as the file that pyarrow reads them from."""

    closed = False

    def __init__(self, start: int, end: int, content: memoryview) -> None:
        self._start, self._end, self._content, self._at = start, end, content, 0

    def seek(self, position: int, whence: int = 0) -> int:
        self._at = position + (self._end if whence == 2 else self._at if whence == 1 else 0)
        return self._at

    def read(self, count: int = -1) -> memoryview:
        start = self._at - self._start
        self._at += count
        return self._content[start : start + count]

    def tell(self) -> int:
        return self._at

    def size(self) -> int:
        return self._end

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        self.closed = True


if __name__ == "__main__":
    print(json.dumps(compare_all(Path(sys.argv[1]), int(sys.argv[2]))))
