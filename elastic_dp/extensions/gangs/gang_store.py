"""The store in which torch's process groups of one worker meet. Every process has all values."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from elastic_dp.distributed.rendezvous import StoreBase


class GangStore(StoreBase):
    """Implements torch's interface. `change` takes a key, and the value to set or the number to add
    to it, to the first process, where changes have one order, and returns the sum. The first
    process has the others `apply` a change before it returns."""

    def __init__(self, change: Callable[[str, bytes | int], int]) -> None:
        super().__init__(timedelta(minutes=5))  # a peer may be in a long download
        self._change, self._values = change, dist.HashStore()

    def apply(self, key: str, value: bytes | int) -> int:
        """Changes this process's value."""
        if isinstance(value, int):
            return int(self._values.add(key, value))
        self._values.set(key, value)  # type: ignore[arg-type]
        return 0

    # ---------------------------------------------------------------------- torch's interface

    def set(self, key: str, value: Any) -> None:
        self._change(key, value.encode() if isinstance(value, str) else bytes(value))

    def add(self, key: str, value: int) -> int:
        return self._change(key, value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values.get(key)

    def wait(self, keys: Any, timeout: timedelta | None = None) -> None:
        self._values.wait(keys, timeout or self._timeout)

    def check(self, keys: Any) -> bool:
        return self._values.check(keys)
