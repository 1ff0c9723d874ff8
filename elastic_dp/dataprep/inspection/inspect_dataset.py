"""`inspect`: numbers about a data set, what in it will be slow to read or refused, and what a job
with given virtual workers would do with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from elastic_dp.config.csv_options import CsvOptions
from elastic_dp.data.discovery.skipped_files import Skipped
from elastic_dp.dataprep.inspection.findings import Finding, JobShape, find
from elastic_dp.dataprep.inspection.shard_survey import Survey, survey
from elastic_dp.errors import DataError


@dataclass(frozen=True)
class Spread:
    """The distribution of a number over the row groups."""

    min: int
    median: int
    max: int


@dataclass(frozen=True)
class ColumnFacts:
    """A column. `stored`: bytes of a row group in the file. `decoded`: in memory. `compression` is
    empty for Arrow, where it is not known."""

    name: str
    type: str
    stored: Spread
    decoded: Spread
    compression: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """An epoch of V virtual workers.

    `streams`: the number of streams into which rows are divided, at most 8 per virtual worker;
    fewer than V are shared. `virtual_worker_bytes`, `all_bytes`: memory of the open row groups of
    one virtual worker, and of all of them, as DataConfig.memory_bytes counts it.
    """

    global_batch: int
    steps_per_epoch: int
    dropped_rows: int  # of an epoch, with tail="drop"
    streams: int
    virtual_worker_bytes: int
    all_bytes: int


@dataclass(frozen=True)
class Inspection:
    """The result of `inspect`. `rows`, `row_groups` and `group_rows` are None if the format says
    them only when everything is read. `skipped`: files that are not shards."""

    url: str
    format: str
    shards: int
    nbytes: int
    rows: int | None
    row_groups: int | None
    group_rows: Spread | None
    columns: tuple[ColumnFacts, ...]
    plan: Plan | None
    findings: tuple[Finding, ...]
    skipped: tuple[Skipped, ...] = ()


def inspect(
    url: str,
    *,
    columns: Sequence[str] | None = None,
    virtual_workers: int | None = None,
    micro_batch_size: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
    csv_options: Mapping[str, Any] | None = None,
    deep: bool = False,
) -> Inspection:
    """Reads the footers of Parquet, the record batches of Arrow files, the first rows of text.
    Raises DataError if there is no data set.

    `deep`: also decode every row of Parquet, Arrow, CSV, JSON and tar, which finds damaged pages,
    and members of a tar that are not what their endings say. A page whose damage decodes to other
    values is found only if it has a checksum.

    `columns`: those that the job needs; None: all. With `virtual_workers` and `micro_batch_size`,
    the result has a plan. `storage_options`, `csv_options`: as in `DataConfig`.
    """
    if (virtual_workers is None) != (micro_batch_size is None):
        raise DataError(
            "virtual_workers and micro_batch_size go together: a global batch is V × b rows"
        )
    for name, value in (
        ("virtual_workers", virtual_workers),
        ("micro_batch_size", micro_batch_size),
    ):
        if value is not None and value < 1:
            raise DataError(f"{name} is {value}, must be at least 1")
    csv = CsvOptions.of(csv_options, "inspect")
    found = survey(url, columns, storage_options, deep=deep, csv=csv)
    shape = JobShape(virtual_workers or 1, micro_batch_size or 1)
    known = found.has_row_groups
    return Inspection(
        url=found.url,
        format=found.format,
        shards=len(found.names),
        nbytes=sum(found.sizes),
        rows=found.rows if known else None,
        row_groups=len(found.group_rows) if known else None,
        group_rows=_spread(found.group_rows),
        columns=_columns(found),
        plan=None if virtual_workers is None else _plan(found, shape),
        findings=find(found, shape),
        skipped=found.skipped,
    )


def _columns(found: Survey) -> tuple[ColumnFacts, ...]:
    facts = []
    for column in found.columns:
        stored, decoded = _spread(column.stored), _spread(column.decoded)
        if stored is not None and decoded is not None:
            codecs = tuple(sorted(column.codecs))
            facts.append(ColumnFacts(column.name, str(column.type), stored, decoded, codecs))
    return tuple(facts)


def _plan(found: Survey, shape: JobShape) -> Plan | None:
    """None if there is not a single step."""
    if (order := shape.order(found)) is None:
        return None
    whole, mean = shape.virtual_workers * shape.micro_batch_size, float(np.mean(found.group_bytes))

    def opened(virtual_workers: int) -> int:
        return int(min(order.open_row_groups(virtual_workers), len(found.group_rows)) * mean)

    return Plan(
        global_batch=whole,
        steps_per_epoch=order.steps_per_epoch,
        dropped_rows=found.rows % whole,
        streams=order.streams,
        virtual_worker_bytes=opened(1),
        all_bytes=opened(shape.virtual_workers),
    )


def _spread(values: list[int]) -> Spread | None:
    return Spread(min(values), int(np.median(values)), max(values)) if values else None
