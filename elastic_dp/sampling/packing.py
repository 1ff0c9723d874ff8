"""The order of packed rows: documents end to end, cut into rows of equal length.

The tokens of an epoch are laid out in one *line*, each exactly once: the row groups in the order of
`EpochOrder`, with the documents of each row group in an order of their own. Packed row r has the
tokens r·L ≤ i < (r + 1)·L of the line, so what is left of a document at the end of a row, and of a
row group at its end, goes into the next row. Packed rows are dealt to virtual workers as rows are:
each stream is a part of the line, which is read from its start to its end.

So a row is a function of (seed, epoch, r) and of the number of tokens of each row group, and
nothing else has to be known or stored. Which documents these are follows from the lengths of the
documents of the row groups that the row touches, mostly one or two, once they are read.

The tokens behind the last complete row are the tail of the epoch: tail="drop" leaves them out,
others in each epoch; tail="short" makes one more row, which is not full.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from elastic_dp.errors import DataError
from elastic_dp.sampling.epoch_order import EpochOrder, Ints
from elastic_dp.sampling.keyed_permutation import derive, permute
from elastic_dp.sampling.order import NOTHING, BaseOrder, Order, Shuffle

_DOCUMENTS = 7  # the purpose of a key; 1 to 6 are used by `Order` and `Mixture`
_LINES_KEPT = 2


class Segments(NamedTuple):
    """Tokens of row groups, in the order in which packed rows have them; int64 [segments].

    Segment i is `lengths[i]` tokens of row group `groups[i]`, from its token `starts[i]` on, in
    the order `PackedOrder.documents`. They begin at token `places[i]` of the micro-batch, of which
    row r has r·L ≤ i < (r + 1)·L. Rows that follow each other in the line share a segment.
    """

    groups: Ints
    starts: Ints
    lengths: Ints
    places: Ints


class PackedOrder(BaseOrder):
    """Like `Order`, for packed rows of `length` tokens.

    `group_tokens` is the number of tokens of each row group, in file order. Raises DataError if an
    epoch has no complete step.
    """

    no_rows = Segments(NOTHING, NOTHING, NOTHING, NOTHING)

    def __init__(
        self,
        *,
        group_tokens: npt.ArrayLike,
        length: int,
        virtual_workers: int,
        micro_batch_size: int,
        group_bytes: npt.ArrayLike | None = None,
        seed: int = 0,
        shuffle: Shuffle = "rows",
        tail: Literal["drop", "short"] = "drop",
    ) -> None:
        self._group_tokens: Ints = np.asarray(group_tokens, dtype=np.int64)
        self.num_tokens, self.length = int(self._group_tokens.sum()), length
        rows = -(-self.num_tokens // length) if tail == "short" else self.num_tokens // length
        if not self.num_tokens:
            raise DataError("DataConfig.pack: the documents have no token")
        if not rows:
            raise DataError(
                f"the documents have {self.num_tokens} tokens together, too few for one row of "
                f'DataConfig.pack={length}; lower pack, or pad the row with tail="short"'
            )
        self._rows = Order(
            group_rows=[rows],
            group_bytes=group_bytes,
            virtual_workers=virtual_workers,
            micro_batch_size=micro_batch_size,
            seed=seed,
            shuffle=shuffle,
            tail=tail,
        )
        self.num_rows, self.steps_per_epoch = rows, self._rows.steps_per_epoch
        self.virtual_workers, self.micro_batch_size = virtual_workers, micro_batch_size
        self.tail = tail
        self.identity = f"packed 1 length={length}: {self._rows.identity}"
        self._line = lru_cache(_LINES_KEPT)(self._lay_out)

    def open_row_groups(self, virtual_workers: int) -> int:
        if self._rows.shuffle == "full":
            return len(self._group_tokens)
        return self._rows.open_row_groups(virtual_workers)

    def rows(self, step: int, virtual_worker: int) -> int:
        return self._rows.rows(step, virtual_worker)

    def locate_each(self, steps: range, virtual_worker: int) -> list[Segments]:
        found: list[Segments] = []
        tokens = self.micro_batch_size * self.length
        for epoch, count, index in self._rows.by_epoch(steps, virtual_worker):
            located = self._locate(epoch, virtual_worker, index)
            cuts = np.searchsorted(located.places, np.arange(count + 1) * tokens)
            for number in range(count):
                part = slice(cuts[number], cuts[number + 1])
                groups, starts, lengths, places = (of_all[part] for of_all in located)
                found.append(Segments(groups, starts, lengths, places - number * tokens))
        return found

    def tokens_of(self, row_group: int) -> int:
        return int(self._group_tokens[row_group])

    @property
    def has_order_of_documents(self) -> bool:
        """Whether the documents of a row group have another order than in the file."""
        return self._rows.shuffle == "rows"

    def documents(self, epoch: int, row_group: int, count: int) -> Ints | None:
        """Return the order of the `count` documents of a row group; None for file order."""
        if not self.has_order_of_documents:
            return None
        key = np.uint64(derive(_DOCUMENTS, self._rows.seed, epoch, row_group))
        return permute(np.arange(count), np.uint64(count), key)

    def _locate(self, epoch: int, virtual_worker: int, index: Ints) -> Segments:
        """Locate rows of the virtual worker's share; `index` counts them from 0 in its order, from
        the first row of a micro-batch on.
        """
        position, _, _ = self._rows.positions(virtual_worker, index)
        if self._rows.shuffle == "full":
            position = self._rows.permuted(epoch, position)
        follows = np.zeros(len(index), dtype=bool)  # in the line, and in the micro-batch
        follows[1:] = position[1:] == position[:-1] + 1
        follows[:: self.micro_batch_size] = False
        row = np.flatnonzero(~follows)
        first = position[row] * self.length
        end = np.append(row, len(index))[1:] - row + position[row]
        count = np.minimum(end * self.length, self.num_tokens) - first
        shuffled = self._rows.shuffle == "rows"
        runs, groups, starts, lengths = self._line(epoch if shuffled else 0).spans(first, count)
        before = np.cumsum(lengths) - lengths
        places = row[runs] * self.length + before - before[np.searchsorted(runs, runs)]
        return Segments(groups, starts, lengths, places)

    def _lay_out(self, epoch: int) -> EpochOrder:
        if self._rows.shuffle == "rows":
            return EpochOrder(self._group_tokens, seed=self._rows.seed, epoch=epoch)
        return EpochOrder.in_file_order(self._group_tokens)
