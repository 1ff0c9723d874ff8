"""A mesh of the processes of one worker, which all run on one machine."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from elastic_dp.distributed.process_group import OPERATION_TIMEOUT, Rendezvous, prove
from elastic_dp.distributed.rendezvous_store import RendezvousStoreClient

DIMENSION = "process"
LOOPBACK = "127.0.0.1"
_FORMING_LIMIT = timedelta(minutes=5)
_INTERFACE = "GLOO_SOCKET_IFNAME"


def open_local_mesh(meet: Rendezvous, number: int, size: int) -> DeviceMesh:
    """Makes torch's default process group of these processes. Returns the mesh of it.

    They meet at a store on this machine. The mesh lives as long as the process, and its collectives
    cannot be aborted. Raises ConnectionError if a peer does not hold the secret.
    """
    store = RendezvousStoreClient(meet.host, meet.port, meet.secret, _FORMING_LIMIT)
    with _on_loopback():
        # A peer may be in a long download. If a peer dies, this process ends.
        dist.init_process_group(
            "gloo", store=store, rank=number, world_size=size, timeout=OPERATION_TIMEOUT
        )
        mesh = init_device_mesh("cpu", (size,), mesh_dim_names=(DIMENSION,))
    backend = mesh.get_group()._get_backend(torch.device("cpu"))
    prove(backend, meet, number, size)
    return mesh


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
