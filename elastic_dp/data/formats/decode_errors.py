"""What a decoder raises, as typed errors that name the shard and the row group."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa

from elastic_dp.data.formats.file_format import RowGroupLocation, ShardAt
from elastic_dp.errors import BadShard, DataError, ElasticError, StorageError
from elastic_dp.storage import ObjectRewritten

_NO_MACHINE_HAS = 1 << 44  # bytes; a damaged number is mostly larger


@contextmanager
def decoding(shard: ShardAt, location: RowGroupLocation) -> Iterator[None]:
    """Within it a row group is read and decoded. A shard that is not the one of the index is a
    DataError, and bytes that cannot be decoded are a BadShard. Errors of the store stay as they
    are."""
    try:
        yield
    except ObjectRewritten as error:
        raise DataError(
            f"{shard.name} was rewritten while the run used it, or is not what the index was made "
            "of; a data set must not change under a run"
        ) from error
    except ElasticError:
        raise
    except OSError as error:
        of_store = isinstance(error, ConnectionError | TimeoutError) or error.errno is not None
        if not of_store:  # raised by a decoder; the operating system sets a number
            raise _bad(shard, location, error) from error
        raise StorageError(f"cannot read {shard.name}: {error}") from error
    except MemoryError as error:
        raise _too_large(shard, location, error) from error
    except pa.ArrowNotImplementedError as error:
        if "Nested data conversions" not in str(error):
            raise _bad(shard, location, error) from error
        raise DataError(  # the file is whole, and its rows must not be skipped
            f"{long_nested_text('a column', location.group, shard.name)}. Arrow says: {error}"
        ) from error
    except Exception as error:  # a decoder may raise anything for damaged content
        raise _bad(shard, location, error) from error


def long_nested_text(column: str, row_group: int, shard: str) -> str:
    return (
        f"{column} of row group {row_group} of {shard} holds lists with more than 2 GiB of text, "
        "which Arrow cannot read; write the data set with smaller row groups "
        "(`elastic-dp data convert --row-group-bytes`), or leave the column out by "
        "DataConfig.columns"
    )


def refuse_other_count(found: int, known: int) -> None:
    """`found`: the number of rows that were decoded. `known`: that of the index."""
    if found != known:
        raise ValueError(f"it has {found} rows, and had {known}")


def _bad(shard: ShardAt, location: RowGroupLocation, error: Exception) -> BadShard:
    return BadShard(shard.name, location.group, f"{type(error).__name__}: {error}")


def _too_large(shard: ShardAt, location: RowGroupLocation, error: MemoryError) -> DataError:
    """Not a BadShard, unless no machine has so much memory: whether a row is skipped must not
    depend on the machine that reads it."""
    asked = re.search(r"size (\d+)", str(error))
    if asked and int(asked[1]) >= _NO_MACHINE_HAS:
        return _bad(shard, location, error)
    return DataError(
        f"row group {location.group} of {shard.name} does not fit into the memory of this machine "
        f"({error}): text that repeats is small in a file and not in memory. Write the data set "
        "with smaller row groups, or leave the column out by DataConfig.columns"
    )
