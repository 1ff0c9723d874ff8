"""Row groups on their way into memory: read and decoded once, kept while they are in use, dropped oldest first.

`rows(groups, rows)` gathers the rows of one micro-batch from decoded row groups; `want(groups)` says that some
will be needed soon, and a few threads read them meanwhile. Both return what they would without the other.
Decoded row groups are shared, so what `rows` returns is always a copy that the caller owns.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from elastic_dp.data.columns import Column, decode_column, gather
from elastic_dp.data.manifest import Manifest, open_file_system
from elastic_dp.errors import DataError
from elastic_dp.spec import DataConfig

CACHE_BYTES = 1 << 30
READ_THREADS = 4
FOOTERS_KEPT = 1024

_Group = dict[str, Column]


class RowGroupReader:
    """Of one data set in one process; may be called by several threads."""

    def __init__(
        self, config: DataConfig, manifest: Manifest, *, cache_bytes: int = CACHE_BYTES
    ) -> None:
        self._manifest = manifest
        self._columns = [name for name, _ in manifest.columns]
        self._system, _ = open_file_system(config)
        self._cache_bytes = cache_bytes
        self._lock = threading.Lock()
        self._groups: OrderedDict[int, Future[tuple[_Group, int]]] = (
            OrderedDict()
        )  # oldest use first
        self._footers: OrderedDict[int, pq.FileMetaData] = OrderedDict()
        self._read_bytes = 0  # of decoded row groups that are kept
        self._pool = ThreadPoolExecutor(READ_THREADS, thread_name_prefix="elastic-dp-read")
        self._closed = False

    def rows(
        self, groups: npt.NDArray[np.int64], rows: npt.NDArray[np.int64]
    ) -> dict[str, npt.NDArray[Any] | list[Any]]:
        """Row `rows[i]` of row group `groups[i]`, in this order: arrays [len(rows), …], or lists of objects."""
        distinct = sorted(set(groups.tolist()))
        waiting = [self._start(group) for group in distinct]
        places = [np.flatnonzero(groups == group) for group in distinct]
        loaded = [future.result()[0] for future in waiting]
        return {
            name: gather(
                [(g[name], rows[at], at) for g, at in zip(loaded, places, strict=True)], len(rows)
            )
            for name in self._columns
        }

    def want(self, groups: Iterable[int]) -> None:
        """Starts to read those that are not here yet, and does not wait. A hint: nothing once closed."""
        for group in groups:
            if not self._closed:
                self._start(group)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._groups.clear()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _start(self, group: int) -> Future[tuple[_Group, int]]:
        with self._lock:
            future = self._groups.get(group)
            if future is not None and not (future.done() and future.exception()):
                self._groups.move_to_end(group)
                return future
            if self._closed:
                raise RuntimeError("the data set is closed")
            future = self._groups[group] = self._pool.submit(self._load, group)
            self._groups.move_to_end(group)
        future.add_done_callback(self._count)
        return future

    def _count(self, future: Future[tuple[_Group, int]]) -> None:
        """Counts what has arrived, and drops the row groups that were not used for longest."""
        if future.cancelled() or future.exception():
            return
        with self._lock:
            self._read_bytes += future.result()[1]
            for group, oldest in list(self._groups.items()):
                if self._read_bytes <= self._cache_bytes or len(self._groups) == 1:
                    break
                if oldest is not future and oldest.done() and not oldest.exception():
                    del self._groups[group]
                    self._read_bytes -= oldest.result()[1]

    def _load(self, group: int) -> tuple[_Group, int]:
        number, index, _ = self._manifest.groups[group]
        shard = self._manifest.shards[number]
        try:
            with self._system.open(shard.path, "rb") as raw:
                file = pq.ParquetFile(raw, metadata=self._footers.get(number), pre_buffer=True)
                self._keep_footer(number, file.metadata)
                same = file.metadata.num_row_groups == len(shard.group_rows)
                if not same or file.metadata.row_group(index).num_rows != shard.group_rows[index]:
                    raise DataError(f"{shard.name} was rewritten while the run used it")
                table = file.read_row_group(index, columns=self._columns, use_threads=False)
        except DataError:
            raise
        except (OSError, pa.ArrowException) as error:
            raise DataError(
                f"cannot read row group {index} of {shard.name}: {type(error).__name__}: {error}"
            ) from error
        decoded = {
            name: decode_column(table.column(name), f"column {name!r} of {shard.name}")
            for name in self._columns
        }
        return decoded, table.nbytes

    def _keep_footer(self, number: int, footer: pq.FileMetaData) -> None:
        with self._lock:
            self._footers[number] = footer
            while len(self._footers) > FOOTERS_KEPT:
                self._footers.popitem(last=False)
