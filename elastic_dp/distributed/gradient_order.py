"""The order in which the parameters of one process get their gradients.

`fully_shard` runs a collective for each group of parameters when the model comes to it, and the
collectives of different processes are paired by their order. A model that takes other layers for
other rows pairs those of different layers, and where they have equal sizes, their values are mixed
up without an error. So each process notes the order, and the processes compare it.
"""

from __future__ import annotations

import xxhash


class GradientOrder:
    """A digest of the order since `begin`."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self._digest = xxhash.xxh3_64()

    def note(self, index: int) -> None:
        """The parameter with this number has got a gradient."""
        self._digest.update(index.to_bytes(4, "little"))

    def digest(self) -> bytes:
        return self._digest.digest()
