"""Notices at once that the process of another member has ended, also while no operation of the
group is under way.

While the hosts poll their devices, Gloo has nothing to do, and a collective of the device only
waits for a peer that is gone. So each member keeps one receive from the next rank open, on a thread
that waits for it: Gloo ends it as soon as the connection is closed. Nothing is sent in a step. A
ring is enough: one member notices, leaves, and the controller ends the generation for the others.

`say_goodbye` is what the other end of such a receive sends when it leaves the group, so that no
thread keeps a group in which nothing happens any more.
"""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Any

import torch

from elastic_dp.threads import background

_TAG = 1
_FOR_EVER = timedelta(days=3650)  # otherwise Gloo takes the time that the group had to form


class DevicePeerWatch:
    def __init__(self, backend: Any, rank: int, world_size: int) -> None:
        """`backend`: Gloo's, among at least two members."""
        self.lost: str | None = None  # why the next rank cannot be reached any more
        self._before = (rank - 1) % world_size
        received = torch.zeros(1, dtype=torch.uint8)

        def watch(work: Any, received: torch.Tensor) -> None:
            """`received` is held, since Gloo writes to it."""
            try:
                work.wait(_FOR_EVER)
            except RuntimeError as error:
                self.lost = str(error).splitlines()[0]

        try:
            work = backend.recv([received], (rank + 1) % world_size, _TAG)
        except RuntimeError as error:
            self.lost = str(error).splitlines()[0]
        else:
            background("peer-watch", partial(watch, work, received)).start()

    def say_goodbye(self, backend: Any) -> tuple[torch.Tensor, Any]:
        """Returns what must be kept until it is sent, and the operation."""
        goodbye = torch.ones(1, dtype=torch.uint8)
        return goodbye, backend.send([goodbye], self._before, _TAG)
