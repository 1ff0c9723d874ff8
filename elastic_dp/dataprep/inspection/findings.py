"""Findings: what in a data set will be slow to read or refused, why, and the command that fixes it.
Each rule is a function of the survey and of the job's shape.

The constants below are the thresholds of the rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from shlex import quote
from typing import Literal

import numpy as np
import pyarrow as pa

from elastic_dp.config import DataConfig
from elastic_dp.data.columns.schema import is_object, refuse_without_tensor
from elastic_dp.dataprep.inspection.shard_survey import Survey
from elastic_dp.errors import DataError
from elastic_dp.sampling.any_order import row_groups_at_least
from elastic_dp.sampling.order import OPEN_BYTES, STREAMS, Order

LARGE_BYTES = 4 << 20  # of one column in one row group, decoded
AIM_BYTES = 2 << 20
SMALL_BYTES = 64 << 10  # of all needed columns in one row group, as stored; a request costs as much
FOOTER_BYTES_PER_CHUNK = 1 << 10
FOOTER_BYTES = 32 << 10
MANY_SHARDS, SMALL_SHARD_BYTES = 10_000, 4 << 20
UNEVEN = 8  # times the median
_SLOW_CODECS = {"zstd", "gzip", "brotli", "bz2"}
_NAMES_SHOWN = 3
_GLOB = "*?["
_NO_SHARDS = ("images", "text")
_PACKED = (".gz", ".bz2", ".zst", ".lz4")


@dataclass(frozen=True)
class Finding:
    """`kind`: "refused": the data set cannot be trained on as it is; "slow": it can. `name`: an
    identifier for programs. `message`: what was found. `fix`: what to do, often a command."""

    name: str
    kind: Literal["refused", "slow"]
    message: str
    fix: str


@dataclass(frozen=True)
class JobShape:
    """The shape of the job; the smallest one if it is not known."""

    virtual_workers: int = 1
    micro_batch_size: int = 1

    @property
    def most_streams(self) -> int:
        return STREAMS * self.virtual_workers

    def order(self, survey: Survey) -> Order | None:
        """None if there is not a single step."""
        if survey.rows < self.virtual_workers * self.micro_batch_size:
            return None
        return Order(
            group_rows=survey.group_rows,
            group_bytes=survey.group_bytes,
            virtual_workers=self.virtual_workers,
            micro_batch_size=self.micro_batch_size,
        )


def find(survey: Survey, shape: JobShape) -> tuple[Finding, ...]:
    """All findings, "refused" ones first."""
    found = [finding for rule in _RULES for finding in rule(survey, shape)]
    return tuple(sorted(found, key=lambda finding: finding.kind))


def size(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.4g} TiB"


def _unscanned(survey: Survey, _: JobShape) -> Iterator[Finding]:
    total, count = size(sum(survey.sizes)), len(survey.names)
    if survey.format in _NO_SHARDS:
        way = " --tokenizer bytes --pack 2049" if survey.format == "text" else ""
        message = f"{count} files of {survey.format} are no shards"
        yield Finding("no_shards", "refused", message, _command(survey) + way)
    elif survey.format == "arrow stream":
        message = (
            "Arrow streams have no footer: the first start of a run walks through all of "
            f"{count} shards, {total}, with a "
            "request for each record batch"
        )
        yield Finding("scan", "slow", message, _command(survey) + " --format arrow")
    elif not survey.has_row_groups and survey.format not in ("mds", "litdata"):
        message = (
            f"{survey.format} has no index: the first start of a run reads all {total} of "
            f"{count} shards "
            "to find where rows begin, and every value is parsed from text or unpacked as it "
            "is read"
        )
        tar = "write Parquet or Arrow instead, if the one scan is too much"
        yield Finding("scan", "slow", message, tar if survey.format == "tar" else _command(survey))


def _packed(survey: Survey, _: JobShape) -> Iterator[Finding]:
    packed = [n for n in survey.names if n.lower().endswith(_PACKED)]
    if packed and survey.format in ("jsonl", "csv"):
        largest = max(s for n, s in zip(survey.names, survey.sizes, strict=True) if n in packed)
        message = (
            f"{len(packed)} shards are compressed ({_some(packed)}; {size(largest)} at most) "
            "and cannot be cut: each is one row group, which each worker that reads a part of it "
            "decompresses and keeps in memory"
        )
        yield Finding("compressed_text", "slow", message, _command(survey))


def _nested(survey: Survey, _: JobShape) -> Iterator[Finding]:
    nested = [name for name in survey.names if "/" in name]
    if (
        nested
        and survey.format not in ("images", "text")
        and not any(m in survey.url for m in _GLOB)
    ):
        message = (
            f"{len(nested)} shards lie in subfolders ({_some(nested)}), which a folder's URL "
            "leaves out"
        )
        yield Finding("nested", "refused", message, f"use {quote(survey.url.rstrip('/') + '/**')}")


def _differing(survey: Survey, _: JobShape) -> Iterator[Finding]:
    if survey.differing:
        yield Finding("schemas_differ", "refused", *_message_and_fix(survey.differing))


def _unreadable(survey: Survey, _: JobShape) -> Iterator[Finding]:
    for error in survey.unreadable[:_NAMES_SHOWN]:
        message, _sep, fix = error.partition("; ")
        yield Finding("unreadable", "refused", message, fix or "fix or remove the file")
    more = len(survey.unreadable) - _NAMES_SHOWN
    if more > 0:
        message = f"{more} more files cannot be read, either"
        yield Finding("unreadable", "refused", message, "fix each of them")


def _no_rows(survey: Survey, _: JobShape) -> Iterator[Finding]:
    if not survey.has_row_groups:
        return
    if not survey.rows:
        yield Finding("no_rows", "refused", "no shard holds a row", "add some")
        return
    empty = [n for n, rows in zip(survey.names, survey.shard_rows, strict=True) if not rows]
    if empty:
        message = (
            f"{len(empty)} of {len(survey.names)} shards hold no row, and are skipped: "
            f"{_some(empty)}"
        )
        yield Finding("empty_shards", "slow", message, "remove them")


def _no_tensor(survey: Survey, _: JobShape) -> Iterator[Finding]:
    for leaf in survey.job_columns.wanted_leaves():
        try:
            refuse_without_tensor(leaf)
        except DataError as error:
            yield Finding("no_tensor", "refused", *_message_and_fix(str(error)))


def _nulls(survey: Survey, _: JobShape) -> Iterator[Finding]:
    for leaf in survey.job_columns.wanted_leaves():
        if refusal := survey.nulls.refused(leaf):
            yield Finding("nulls", "refused", *_message_and_fix(refusal))


def _ragged(survey: Survey, _: JobShape) -> Iterator[Finding]:
    for column in survey.columns:
        if column.name in survey.ragged and not is_object(column.type):
            message = (
                f"column {column.name!r} ({column.type}) holds lists of several lengths, which "
                "make no one tensor"
            )
            fix = "pad them in DataConfig.collate_fn, or pack them: elastic-dp data convert --pack"
            yield Finding("ragged", "refused", message, fix)


def _too_few_rows(survey: Survey, shape: JobShape) -> Iterator[Finding]:
    whole = shape.virtual_workers * shape.micro_batch_size
    if 0 < survey.rows < whole:
        message = (
            f"{survey.rows} rows are fewer than one global batch of {whole} "
            f"({shape.virtual_workers} virtual workers × "
            f"micro_batch_size {shape.micro_batch_size})"
        )
        yield Finding(
            "too_few_rows", "refused", message, 'add rows, or set DataConfig.tail="short"'
        )


def _memory(survey: Survey, shape: JobShape) -> Iterator[Finding]:
    """The same check as in opening.py."""
    if (order := shape.order(survey)) is None:
        return
    count = row_groups_at_least(order)
    needed = int(np.sort(survey.group_bytes)[-count:].sum())
    if needed > DataConfig.memory_bytes:
        message = (
            f"one worker that runs all {shape.virtual_workers} virtual workers has up to "
            f"{min(count, len(survey.group_rows))} row groups open, {size(needed)} (the "
            f"largest has {size(max(survey.group_bytes))}), more than the default of "
            f"DataConfig.memory_bytes, {size(DataConfig.memory_bytes)}"
        )
        yield Finding("memory", "refused", message, _command(survey, _good_rows(survey, shape)))


def _shared(survey: Survey, shape: JobShape) -> Iterator[Finding]:
    order = shape.order(survey)
    if order is None or order.streams >= shape.virtual_workers:
        return
    mean, each = float(np.mean(survey.group_bytes)), -(-shape.virtual_workers // order.streams)
    message = (
        f"row groups take {size(mean)} in memory (mean), so {order.streams} of them fit into "
        f"the {size(OPEN_BYTES)} "
        f"that all streams may have open, fewer than {shape.virtual_workers} virtual "
        f"workers: up to {each} of these "
        "share a stream, and each worker that runs one of them reads all of it, up to "
        f"{each} times the traffic"
    )
    yield Finding("shared_streams", "slow", message, _command(survey, _good_rows(survey, shape)))


def _uneven(survey: Survey, shape: JobShape) -> Iterator[Finding]:
    if not survey.group_bytes:
        return
    largest, median = max(survey.group_bytes), float(np.median(survey.group_bytes))
    if largest > max(UNEVEN * median, UNEVEN * LARGE_BYTES):
        message = (
            f"row groups differ in size: the largest takes {size(largest)} in memory, half "
            f"of them at most {size(median)}; "
            "the memory that a worker needs is that of the largest ones"
        )
        yield Finding("uneven_row_groups", "slow", message, _command(survey))


def _large(survey: Survey, shape: JobShape) -> Iterator[Finding]:
    for column in survey.columns:
        if survey.group_rows and (median := float(np.median(column.decoded))) > LARGE_BYTES:
            rows = _good_rows(survey, shape)
            message = (
                f"row groups have {size(median)} in column {column.name!r} (median; "
                f"{size(max(column.decoded))} "
                f"at most): a virtual worker keeps {STREAMS} of them open, and a resume "
                "reads as many again; "
                f"aim at 1 to 4 MiB, here {rows} rows"
            )
            yield Finding("large_row_groups", "slow", message, _command(survey, rows))
            return


def _small(survey: Survey, shape: JobShape) -> Iterator[Finding]:
    """Not for a data set that is so small that streams would have even less."""
    stored, streams = survey.stored(), shape.most_streams
    if len(stored) <= streams or stored.sum() < streams * SMALL_BYTES:
        return
    if (median := float(np.median(stored))) < SMALL_BYTES:
        rows = _good_rows(survey, shape)
        message = (
            f"row groups have {size(median)} (median of {len(stored)}): on an object store "
            "the request costs more "
            f"than the bytes; aim at 1 to 4 MiB of the widest column, here {rows} rows"
        )
        yield Finding("small_row_groups", "slow", message, _command(survey, rows))


def _few(survey: Survey, shape: JobShape) -> Iterator[Finding]:
    count, streams = len(survey.group_rows), shape.most_streams
    if not survey.rows or count >= streams:
        return
    message = (
        f'{count} row groups for {streams} streams (virtual workers × {STREAMS}): shuffle="rows" '
        "mixes less than it could"
    )
    if survey.stored().sum() < streams * SMALL_BYTES:
        fix = (
            f'set DataConfig.shuffle="full": the rows take {size(int(survey.decoded().sum()))} '
            "in memory"
        )
    else:
        fix = _command(survey, _good_rows(survey, shape))
    yield Finding("few_row_groups", "slow", message, fix)


def _good_rows(survey: Survey, shape: JobShape) -> int:
    """The rows that take AIM_BYTES in the widest column; or fewer, so that each stream has a row
    group of its own."""
    widest, streams = max(sum(column.decoded) for column in survey.columns), shape.most_streams
    return max(1, min(AIM_BYTES * survey.rows // max(widest, 1), survey.rows // streams))


def _codec(survey: Survey, _: JobShape) -> Iterator[Finding]:
    for column in survey.columns:
        if _is_tokens(column.type) and (slow := column.codecs & _SLOW_CODECS):
            stored, decoded = sum(column.stored), sum(column.decoded)
            message = (
                f"column {column.name!r} ({column.type}) is compressed by "
                f"{_some(sorted(slow))}, {size(decoded)} to "
                f"{size(stored)}: whole numbers decode about 1.7 times slower so"
            )
            yield Finding("slow_codec", "slow", message, _command(survey) + " --compression none")


def _dictionary(survey: Survey, _: JobShape) -> Iterator[Finding]:
    for column in survey.columns:
        if _is_tokens(column.type) and any("DICTIONARY" in name for name in column.encodings):
            message = (
                f"column {column.name!r} ({column.type}) is dictionary encoded, a look-up for "
                "each number"
            )
            yield Finding("dictionary", "slow", message, _command(survey))


def _footers(survey: Survey, _: JobShape) -> Iterator[Finding]:
    chunks = sum(column.chunks for column in survey.columns)
    each, total = survey.footer_bytes / max(chunks, 1), survey.footer_bytes
    if total > FOOTER_BYTES and each > FOOTER_BYTES_PER_CHUNK:
        message = (
            f"footers have {size(total)}, {size(each)} for each column of a row group, and "
            "are read at the first start; "
            "statistics of long values do that, and nothing here reads them"
        )
        yield Finding("large_footers", "slow", message, _command(survey))


def _small_shards(survey: Survey, _: JobShape) -> Iterator[Finding]:
    count, mean = len(survey.names), sum(survey.sizes) / max(len(survey.names), 1)
    if count >= MANY_SHARDS and mean < SMALL_SHARD_BYTES and survey.format not in _NO_SHARDS:
        message = (
            f"{count:,} shards of {size(mean)} (mean): the first start of a run asks for each "
            "one's footer"
        )
        yield Finding("small_shards", "slow", message, _command(survey))


def _command(survey: Survey, rows: int | None = None) -> str:
    """The command that converts the data set to a folder next to it."""
    fixed = survey.url
    for mark in _GLOB:
        fixed = fixed.partition(mark)[0]
    to = f"{fixed.rstrip('/')}-converted"
    how = f" --rows-per-group {rows}" if rows else ""
    return f"elastic-dp data convert {quote(survey.url)} {quote(to)}{how}"


def _is_tokens(kind: pa.DataType) -> bool:
    return bool(_holds_lists(kind) and pa.types.is_integer(kind.value_type))


def _holds_lists(kind: pa.DataType) -> bool:
    lists = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return any(is_one(kind) for is_one in lists)


def _message_and_fix(refusal: str) -> tuple[str, str]:
    message, _, fix = refusal.removeprefix("DataConfig.columns: ").partition("; ")
    return message, fix or "leave the column out by DataConfig.columns"


def _some(names: list[str]) -> str:
    more = ", …" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(names[:_NAMES_SHOWN]) + more


_RULES: tuple[Callable[[Survey, JobShape], Iterator[Finding]], ...] = (
    *(_unscanned, _nested, _differing, _unreadable, _no_rows, _no_tensor, _nulls, _ragged),
    *(_too_few_rows, _memory, _shared, _uneven, _packed),
    *(_large, _small, _few, _codec, _dictionary, _footers, _small_shards),
)
