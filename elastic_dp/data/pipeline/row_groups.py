"""Row groups of a data set, whatever the shards' format: the port that reading goes through, and
its one real side.

`read` runs in many threads at once. It is the place where what a decoder says becomes an error with
a name: a shard that is not what the index saw is a DataError, bytes that cannot be decoded are a
BadShard, and what the store says stays as it is.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Protocol

import pyarrow as pa

from elastic_dp.config import DataConfig
from elastic_dp.data.columns.arrow_arrays import Column, Lists, decode_table
from elastic_dp.data.columns.column_types import plain
from elastic_dp.data.columns.schema import leaves
from elastic_dp.data.discovery.index import Index
from elastic_dp.data.discovery.listing import path_of, prefix_of
from elastic_dp.data.formats.format import Format, Ints, Place, ShardAt
from elastic_dp.data.formats.format_registry import FORMATS
from elastic_dp.errors import BadShard, DataError, ElasticError, StorageError
from elastic_dp.storage import ObjectRewritten, Store

# What Arrow used to decode a row group of this size goes back at once. Its allocator would keep it
# for a second, in which the next ones come: with 64 MiB each a worker grew by up to 1.14 of its
# budget, and by 0.97 so. Smaller ones fit into what smaller ones left.
GIVEN_BACK_BYTES = 64 << 20
SHARDS_KNOWN = 1024  # whose part of the index is looked up once


class RowGroups(Protocol):
    """All that a reader knows of storage and formats; a fake of it is a list of tables."""

    rows: Ints  # [row group]
    nbytes: Ints  # [row group]: what it takes, encoded and decoded, roughly; the order goes by it
    reading_bytes: Ints  # [row group]: upper estimate of what it takes at once while it is read

    def read(self, row_group: int) -> tuple[dict[str, Column], int]:
        """Decoded columns, and the bytes of memory that they hold. Raises BadShard, DataError,
        StorageError."""

    def name(self, row_group: int) -> tuple[str, int, int]:
        """The shard's name, the row group's number in it, and that of its first row."""

    def close(self) -> None: ...


class ShardRowGroups:
    """Those of an index, in the stores of `config`'s URLs. Thread safe."""

    def __init__(self, config: DataConfig, index: Index, stores: list[Store]) -> None:
        """`stores`: one for each of `config.urls`, which must be the ones that the index was made
        of."""
        assert len(stores) == len(config.urls) == len(index.sources), "an index of another config"
        self.rows, self.nbytes = index.rows, index.nbytes
        self.reading_bytes = index.nbytes.copy()
        for source in index.sources:
            of_source = slice(source.first_group, source.end_group)
            self.reading_bytes[of_source] = FORMATS[source.format].growth * index.nbytes[of_source]
        self._index, self._stores = index, stores
        self._shard = lru_cache(SHARDS_KNOWN)(self._find_shard)
        several = len(stores) > 1
        each = zip(config.urls, index.sources, strict=True)
        self._prefixes = [prefix_of(url, s.is_file) if several else "" for url, s in each]
        self._formats = {name: FORMATS[name]() for name in {s.format for s in index.sources}}
        types = {leaf.name: plain(leaf.type) for leaf in leaves(index.schema)}
        self._leaves = [name for name, _ in index.columns]
        self._fields = [(name, types[name]) for name in self._leaves]
        self._fills = dict(config.fill_nulls or {})

    def read(self, row_group: int) -> tuple[dict[str, Column], int]:
        number = self._index.shard_of(row_group)
        shard = self._shard(number)
        place = self._place(number, row_group)
        try:
            table = self._read_table(number, shard, place)
            if table.num_rows != self.rows[row_group]:
                raise ValueError(f"it has {table.num_rows} rows, and had {self.rows[row_group]}")
            where = f"row group {place.group} of {shard.name}"
            columns = decode_table(table, self._fields, where, self._fills)
            if self.nbytes[row_group] >= GIVEN_BACK_BYTES:
                pa.default_memory_pool().release_unused()
            grew = self._format(number).growth > 1
            return columns, sum(_held_bytes(c) if grew else c.nbytes for c in columns.values())
        except ObjectRewritten as error:
            raise _rewritten(shard) from error
        except ElasticError:
            raise
        except OSError as error:
            if (
                error.errno is None
            ):  # a decoder's word for content; with a number it is the machine's
                raise _bad(shard, place, error) from error
            raise StorageError(f"cannot read {shard.name}: {error}") from error
        except Exception as error:  # a decoder may raise anything at bytes that are not its own
            raise _bad(shard, place, error) from error

    def name(self, row_group: int) -> tuple[str, int, int]:
        shard = self._index.shard_of(row_group)
        group = row_group - int(self._index.group_bounds[shard])
        return self._shard_name(shard), group, self._index.first_row(row_group)

    def close(self) -> None:
        for opened in self._formats.values():
            opened.close()

    def _read_table(self, number: int, shard: ShardAt, place: Place) -> pa.Table:
        return self._format(number).read(shard, place, self._index.schema, self._leaves)

    def _format(self, number: int) -> Format:
        return self._formats[self._index.sources[self._source(number)].format]

    def _find_shard(self, number: int) -> ShardAt:
        index, source = self._index, self._source(number)
        store, is_file = self._stores[source], index.sources[source].is_file
        facts = ("size", "version", "check", "tail")
        size, version, check, tail = (index.shards[name][number].as_py() for name in facts)
        return ShardAt(
            store=store,
            path=path_of(store.path, index.name(number), is_file),
            size=size,
            version=version,
            name=self._shard_name(number),
            check=check,
            tail=tail,
            head=int(index.starts[index.group_bounds[number]]),
            footer=index.footer(number),
        )

    def _place(self, number: int, row_group: int) -> Place:
        index = self._index
        group = row_group - int(index.group_bounds[number])
        return Place(group, int(index.starts[row_group]), int(index.ends[row_group]))

    def _source(self, number: int) -> int:
        return int(self._index.shards["source"][number].as_py())

    def _shard_name(self, number: int) -> str:
        return self._prefixes[self._source(number)] + self._index.name(number)


def _held_bytes(column: Column) -> int:
    """Its buffers grew by doubling: all of a small one was in use before, of a large one only what
    was written counts."""
    if isinstance(column, Lists):
        return _held_bytes(column.values) + column.offsets.nbytes
    if isinstance(column, pa.Array):
        return sum(_capacity(buffer.size) for buffer in column.buffers() if buffer is not None)
    return _capacity(column.nbytes)


def _capacity(nbytes: int) -> int:
    return 1 << (nbytes - 1).bit_length() if 0 < nbytes < GIVEN_BACK_BYTES else nbytes


def _bad(shard: ShardAt, place: Place, error: Exception) -> BadShard:
    return BadShard(shard.name, place.group, f"{type(error).__name__}: {error}")


def _rewritten(shard: ShardAt) -> DataError:
    return DataError(
        f"{shard.name} was rewritten while the run used it, or is not what the index was "
        "made of; a data set "
        "must not change under a run"
    )
