"""A small record of every rank for every rank, in one collective of a fixed size.

The size is agreed because all ranks start from the same one and grow it by the same rule: when somebody's record
did not fit, all see the length it needs, and gather once more with room for it.
"""

from __future__ import annotations

import torch

from elastic_dp.distributed.process_group import Operation, ProcessGroup

_LENGTH_BYTES = 4
_FIRST_CAPACITY = 512


class Header:
    """Gathers one record per rank; `launch` does not wait, `collect` does."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._capacity = _FIRST_CAPACITY
        self._payload = b""
        self._rows = torch.empty(0)
        self._operation: Operation | None = None

    def launch(self, payload: bytes) -> None:
        self._payload = payload
        if self._group.world_size > 1:
            self._gather()

    def collect(self) -> list[bytes]:
        """The records in rank order."""
        if self._group.world_size == 1:
            return [self._payload]
        while True:
            assert self._operation is not None
            self._group.wait(self._operation)
            rows = self._rows.cpu().numpy()
            lengths = [int.from_bytes(row[:_LENGTH_BYTES].tobytes(), "little") for row in rows]
            if max(lengths) <= self._capacity:
                return [
                    row[_LENGTH_BYTES : _LENGTH_BYTES + length].tobytes()
                    for row, length in zip(rows, lengths, strict=True)
                ]
            while self._capacity < max(lengths):
                self._capacity *= 2
            self._gather()

    def _gather(self) -> None:
        row = bytearray(_LENGTH_BYTES + self._capacity)
        row[:_LENGTH_BYTES] = len(self._payload).to_bytes(_LENGTH_BYTES, "little")
        fitting = self._payload[: self._capacity]
        row[_LENGTH_BYTES : _LENGTH_BYTES + len(fitting)] = fitting
        mine = torch.frombuffer(row, dtype=torch.uint8).to(self._group.home)
        rows = torch.empty(self._group.world_size * len(row), dtype=torch.uint8, device=mine.device)
        self._operation = self._group.all_gather(rows, mine)
        self._rows = rows.view(self._group.world_size, len(row))
