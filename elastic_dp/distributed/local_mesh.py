"""A mesh of the processes of one worker, which all run on one machine."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from elastic_dp.distributed.rendezvous_store import RendezvousStoreClient

DIMENSION = "process"
LOOPBACK = "127.0.0.1"
_FORMING_LIMIT = timedelta(minutes=5)
_INTERFACE = "GLOO_SOCKET_IFNAME"


def open_local_mesh(port: int, secret: bytes, number: int, size: int) -> DeviceMesh:
    """Makes torch's default process group of these processes. Returns the mesh of it.

    `port` is that of a rendezvous store on this machine. The mesh lives as long as the process, and
    its collectives cannot be aborted.
    """
    store = RendezvousStoreClient(LOOPBACK, port, secret, _FORMING_LIMIT)
    with _on_loopback():
        dist.init_process_group("gloo", store=store, rank=number, world_size=size)
        return init_device_mesh("cpu", (size,), mesh_dim_names=(DIMENSION,))


@contextlib.contextmanager
def _on_loopback() -> Iterator[None]:
    """A context in which Gloo listens on this machine's loopback interface only."""
    before = os.environ.get(_INTERFACE)
    os.environ[_INTERFACE] = "lo"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_INTERFACE]
        else:
            os.environ[_INTERFACE] = before
