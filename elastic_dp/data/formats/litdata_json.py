"""Values of litdata's JSON serializer: JSON, or a compact form of it in binary, whose first byte
says what follows. Lengths are uint32, numbers 64 bits, all in the order of bytes of x86."""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np

_JSON, _TEXTS, _INTS, _FLOATS, _BOOLS, _DICT, _RECORDS = range(7)
_TEXT, _INT, _FLOAT, _BOOL, _NONE = range(7, 12)
_FIRST_OF_TEXT = 0x20  # larger first bytes are those of JSON itself
_IN_RECORDS = {0x10: _NONE, 0x11: _TEXT, 0x12: _INT, 0x13: _FLOAT, 0x14: _BOOL}
_DEPTH = 200


def parse_json(content: bytes) -> Any:
    """Raises ValueError or struct.error for content that was damaged."""
    if not content or content[0] > _FIRST_OF_TEXT:
        return json.loads(content)
    reader = _Reader(content)
    value = reader.value(_DEPTH)
    if reader.at != len(content):
        raise ValueError("bytes follow the end of a value")
    return value


class _Reader:
    def __init__(self, content: bytes) -> None:
        self._content = content
        self.at = 0

    def value(self, depth: int) -> Any:
        return self._of_kind(self._take(1)[0], depth)

    def _of_kind(self, kind: int, depth: int) -> Any:
        if depth == 0:
            raise ValueError("values lie too deep in one another")
        if kind == _JSON:
            return json.loads(self._take(self._count()))
        if kind == _TEXTS:
            return [self._text() for _ in range(self._counted(4))]
        if kind in (_INTS, _FLOATS):
            dtype = "<i8" if kind == _INTS else "<f8"
            return np.frombuffer(self._take(8 * self._count()), dtype).tolist()
        if kind == _BOOLS:
            return [byte != 0 for byte in self._take(self._count())]
        if kind == _DICT:
            return {self._text(): self.value(depth - 1) for _ in range(self._counted(5))}
        if kind == _RECORDS:
            return self._records()
        if kind == _TEXT:
            return self._text()
        if kind in (_INT, _FLOAT):
            return struct.unpack("<q" if kind == _INT else "<d", self._take(8))[0]
        if kind == _BOOL:
            return self._take(1) != b"\0"
        if kind == _NONE:
            return None
        raise ValueError(f"a value begins with the byte {kind}")

    def _records(self) -> list[dict[str, Any]]:
        rows = self._count()
        keys = [self._text() for _ in range(self._counted(4))]
        if rows * len(keys) > len(self._content) - self.at or (rows and not keys):
            raise ValueError("records are longer than their value")
        return [
            {key: self._of_kind(_IN_RECORDS.get(self._take(1)[0], -1), 1) for key in keys}
            for _ in range(rows)
        ]

    def _text(self) -> str:
        return self._take(self._count()).decode()

    def _count(self) -> int:
        return int.from_bytes(self._take(4), "little")

    def _counted(self, least_bytes: int) -> int:
        """A number of values that take at least so many bytes each."""
        count = self._count()
        if count * least_bytes > len(self._content) - self.at:
            raise ValueError("values are longer than what holds them")
        return count

    def _take(self, nbytes: int) -> bytes:
        end = self.at + nbytes
        if end > len(self._content):
            raise ValueError("a value was cut off")
        found = self._content[self.at : end]
        self.at = end
        return found
