"""`inspect`: what a data set has, and what in it makes a run fail or slow.

It opens the data set as training does, so it refuses what training refuses, in the same words. The
constants below are the thresholds of its rules.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from shlex import quote
from typing import Any, Literal

import numpy as np

from elastic_dp.config import DataConfig
from elastic_dp.data.discovery.index import read_index
from elastic_dp.data.discovery.shard_index import Index
from elastic_dp.data.pipeline.row_groups import RowGroups, check_memory
from elastic_dp.errors import DataError
from elastic_dp.sampling.order import OPEN_BYTES, STREAMS, Order
from elastic_dp.storage import redact_url

LARGE_BYTES = 16 << 20  # of a row group, decoded
AIM_BYTES = 2 << 20
SMALL_BYTES = 64 << 10  # of a row group, as stored; a request costs as much
MANY_SHARDS, SMALL_SHARD_BYTES = 10_000, 4 << 20
_BAD_NAMED = 3


@dataclass(frozen=True)
class Finding:
    """`kind`: "refused": training fails; "slow": it does not. `name`: an identifier for programs.
    `message`: what was found. `fix`: what to do, often a command."""

    name: str
    kind: Literal["refused", "slow"]
    message: str
    fix: str


@dataclass(frozen=True)
class Spread:
    """The distribution of a number over the row groups."""

    min: int
    median: int
    max: int


@dataclass(frozen=True)
class Plan:
    """An epoch of V virtual workers. `streams`: into how many the rows are divided; virtual workers
    share them if they are fewer. `open_bytes`: the row groups that a worker with one virtual worker
    has open at once, and one with all of them."""

    global_batch: int
    steps_per_epoch: int
    dropped_rows: int  # of an epoch, with tail="drop"
    streams: int
    open_bytes: tuple[int, int]


@dataclass(frozen=True)
class Inspection:
    """`columns`: name and type of what a batch has. `group_bytes`: decoded. All counts are 0 where
    training refuses the data set."""

    url: str
    format: str
    shards: int
    nbytes: int
    rows: int
    row_groups: int
    group_rows: Spread | None
    group_bytes: Spread | None
    columns: tuple[tuple[str, str], ...]
    plan: Plan | None
    findings: tuple[Finding, ...]


def inspect(
    url: str | os.PathLike[str],
    *,
    columns: Sequence[str] | None = None,
    virtual_workers: int | None = None,
    micro_batch_size: int | None = None,
    deep: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> Inspection:
    """Reads what training reads before its first step: the footers of Parquet and Arrow.

    - `columns`: those that the job needs; None: all.
    - `virtual_workers` and `micro_batch_size`: also say what such a job would do.
    - `deep`: decode every row, to find damaged ones. Damage that decodes to another value is found
      only in pages with a checksum.
    - `storage_options`: as in `DataConfig`.

    Raises StorageError if the store cannot be read.
    """
    if (virtual_workers is None) != (micro_batch_size is None):
        raise DataError(
            "virtual_workers and micro_batch_size go together: a global batch is V × b rows"
        )
    given = {"virtual_workers": virtual_workers, "micro_batch_size": micro_batch_size}
    for name, number in given.items():
        if number is not None and number < 1:
            raise DataError(f"{name} is {number}, must be at least 1")
    url = os.fspath(url)
    config = DataConfig(
        url,
        micro_batch_size=micro_batch_size or 1,
        columns=columns,
        storage_options=storage_options,
    )
    try:
        index = read_index(config)
    except DataError as error:
        refused = (_refused("refused", str(error)),)
        return Inspection(redact_url(url), "", 0, 0, 0, 0, None, None, (), None, refused)
    job = _Job(config, index, virtual_workers or 1)
    findings = list(_rules(job))
    if deep:
        findings += _damaged(job)
    return Inspection(
        url=redact_url(url),
        format=index.sources[0].format,
        shards=index.num_shards,
        nbytes=int(index.shards["size"].to_numpy().sum()),
        rows=index.num_rows,
        row_groups=len(index.rows),
        group_rows=_spread(index.rows),
        group_bytes=_spread(index.nbytes),
        columns=index.columns,
        plan=None if virtual_workers is None else _plan(job),
        findings=tuple(sorted(findings, key=lambda finding: finding.kind)),
    )


class _Job:
    """The data set, as a job with so many virtual workers reads it."""

    def __init__(self, config: DataConfig, index: Index, virtual_workers: int) -> None:
        self.config, self.index, self.virtual_workers = config, index, virtual_workers
        self.row_groups = RowGroups(config, index)
        self.stored = index.ends - index.starts
        self.global_batch = virtual_workers * config.micro_batch_size
        self.order: Order | None = None  # None: there is not a single step
        if index.num_rows >= self.global_batch:
            self.order = Order(
                group_rows=index.rows,
                group_bytes=index.stored_bytes,
                virtual_workers=virtual_workers,
                micro_batch_size=config.micro_batch_size,
            )

    def command(self) -> str:
        """The command that converts the data set to a folder next to it, with row groups of a good
        size: so small that each stream has one of its own."""
        url = self.config.urls[0]
        for mark in "*?[":
            url = url.partition(mark)[0]
        streams = STREAMS * self.virtual_workers
        aim = min(AIM_BYTES, int(self.stored.sum()) // streams)
        how = "" if aim >= AIM_BYTES else f" --row-group-bytes {max(aim, 1)}"
        to = f"{url.rstrip('/')}-converted"
        return f"elastic-dp data convert {quote(self.config.urls[0])} {quote(to)}{how}"


def size(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.4g} TiB"


def _refused(name: str, error: str) -> Finding:
    message, _, fix = error.partition("; ")
    return Finding(name, "refused", message, fix or "see the message")


def _rules(job: _Job) -> Iterator[Finding]:
    index, order, count = job.index, job.order, len(job.index.rows)
    stored, nbytes = job.stored, job.index.nbytes
    streams = STREAMS * job.virtual_workers

    def slow(name: str, message: str, fix: str = "") -> Finding:
        return Finding(name, "slow", message, fix or job.command())

    if order is None:
        message = (
            f"{index.num_rows} rows are fewer than one global batch of {job.global_batch} "
            f"({job.virtual_workers} virtual workers × {job.config.micro_batch_size})"
        )
        fix = 'add rows, or set DataConfig.tail="short"'
        yield Finding("too_few_rows", "refused", message, fix)
    else:
        try:
            check_memory(job.row_groups, order, DataConfig.memory_bytes)
        except DataError as error:
            yield Finding("memory", "refused", str(error).partition("; ")[0], job.command())
    if order is not None and order.streams < job.virtual_workers:
        each = -(-job.virtual_workers // order.streams)
        yield slow(
            "shared_streams",
            f"row groups have {size(nbytes.mean())} in memory (mean): {order.streams} of them fit "
            f"into the {size(OPEN_BYTES)} that all streams may have open. Up to {each} virtual "
            "workers share a stream, and each worker reads all of it",
        )
    if (median := float(np.median(nbytes))) > LARGE_BYTES:
        yield slow(
            "large_row_groups",
            f"row groups have {size(median)} in memory (median; {size(nbytes.max())} at most): a "
            f"virtual worker keeps {STREAMS} of them open, and a resume reads as many",
        )
    is_small = stored.sum() < streams * SMALL_BYTES  # streams would have even less
    if count > streams and not is_small and (median := float(np.median(stored))) < SMALL_BYTES:
        yield slow(
            "small_row_groups",
            f"row groups have {size(median)} (median of {count}): on an object store the request "
            "costs more than the bytes",
        )
    if count < streams:
        yield slow(
            "few_row_groups",
            f"{count} row groups for {streams} streams (virtual workers × {STREAMS}): "
            'shuffle="rows" mixes less than it could',
            f'set DataConfig.shuffle="full": the rows take {size(nbytes.sum())}'
            if is_small
            else "",
        )
    shards, mean = index.num_shards, index.shards["size"].to_numpy().mean()
    if shards >= MANY_SHARDS and mean < SMALL_SHARD_BYTES:
        yield slow(
            "small_shards",
            f"{shards:,} shards of {size(mean)} (mean): the first start of a run asks for each "
            "one's footer",
        )


def _damaged(job: _Job) -> list[Finding]:
    found = list[Finding]()
    for number in range(len(job.index.rows)):
        try:
            job.row_groups.read(number)
        except DataError as error:  # BadShard is one
            found.append(_refused("unreadable", str(error)))
    if len(found) > _BAD_NAMED:
        more = f"{len(found) - _BAD_NAMED} more row groups cannot be read"
        found[_BAD_NAMED:] = [Finding("unreadable", "refused", more, "write the shards again")]
    return found


def _plan(job: _Job) -> Plan | None:
    if job.order is None:
        return None
    order, mean = job.order, float(job.index.nbytes.mean())
    opened = [order.open_row_groups(n) for n in (1, job.virtual_workers)]
    one, every = (int(min(n, len(job.index.rows)) * mean) for n in opened)
    dropped = job.index.num_rows % job.global_batch
    return Plan(job.global_batch, order.steps_per_epoch, dropped, order.streams, (one, every))


def _spread(values: Any) -> Spread:
    return Spread(int(values.min()), int(np.median(values)), int(values.max()))
