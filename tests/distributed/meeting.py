"""Where members of a test's groups meet, without a controller."""

import torch
import torch.distributed as dist

from elastic_dp.distributed.process_group import GroupFormation
from elastic_dp.distributed.rendezvous import GroupName, Rendezvous, RendezvousTables
from tests.patience import PATIENCE_S

CPU = torch.device("cpu")


class InMemory(Rendezvous):
    """For members that are threads of one process."""

    def __init__(self, secret=b"secret"):
        self.tables = RendezvousTables()
        super().__init__("w1", secret, self._pass_on)

    def _pass_on(self, record):
        complete = self.tables.add(record)
        if complete is not None:
            self.deliver(complete[1])


class OverTcp(Rendezvous):
    """For members that are processes. The store is in the one that is its master."""

    def __init__(self, port):
        super().__init__("w1", b"secret", lambda record: None)
        self._port = port

    def store(self, group, rank, world_size, timeout):
        store = dist.TCPStore("127.0.0.1", self._port, is_master=False, timeout=timeout)
        return dist.PrefixStore(str(group), store)


def form(meet, rank, world_size, *, generation=1, device=CPU):
    formation = GroupFormation(
        meet,
        GroupName(generation, "main"),
        rank=rank,
        world_size=world_size,
        device=device,
        timeout_s=PATIENCE_S,
    )
    return formation.start().wait()
