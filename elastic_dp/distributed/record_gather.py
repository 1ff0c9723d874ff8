"""Gathers one small record of every rank on every rank, in one collective of a fixed size.

All ranks start with the same size and grow it by the same rule: if a record did not fit, all ranks
see the length that it needs and gather again with that size.
"""

from __future__ import annotations

import torch

from elastic_dp.distributed.process_group import Operation, ProcessGroup

_LENGTH_BYTES = 4
_FIRST_CAPACITY = 512


class RecordGather:
    """Gathers one record per rank; `launch` does not wait, `collect` does."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._payload = b""
        self._operation: Operation | None = None
        self._make_room(_FIRST_CAPACITY)

    def launch(self, payload: bytes) -> None:
        self._payload = payload
        if self._group.world_size > 1:
            self._gather()

    def collect(self) -> list[bytes]:
        """Waits for the records and returns them in rank order."""
        if self._group.world_size == 1:
            return [self._payload]
        while True:
            assert self._operation is not None
            self._group.wait(self._operation)
            rows = self._rows.numpy().tobytes()
            heads = range(0, len(rows), len(self._row))
            lengths = [int.from_bytes(rows[h : h + _LENGTH_BYTES], "little") for h in heads]
            capacity = len(self._row) - _LENGTH_BYTES
            if max(lengths) <= capacity:
                starts = [head + _LENGTH_BYTES for head in heads]
                return [rows[at : at + length] for at, length in zip(starts, lengths, strict=True)]
            while capacity < max(lengths):
                capacity *= 2
            self._make_room(capacity)
            self._gather()

    def _make_room(self, capacity: int) -> None:
        """Allocates buffers that are reused for every gather of the group, one at a time."""
        self._row = torch.zeros(_LENGTH_BYTES + capacity, dtype=torch.uint8)
        self._bytes = self._row.numpy().data
        self._rows = torch.empty(self._group.world_size * len(self._row), dtype=torch.uint8)

    def _gather(self) -> None:
        fitting = self._payload[: len(self._row) - _LENGTH_BYTES]
        self._bytes[:_LENGTH_BYTES] = len(self._payload).to_bytes(_LENGTH_BYTES, "little")
        self._bytes[_LENGTH_BYTES : _LENGTH_BYTES + len(fitting)] = fitting
        self._operation = self._group.all_gather(self._rows, self._row)
