"""The mesh of the processes of one worker, and its kind: that of their machines, and on GPUs the
order in which sums among them are added.

NCCL adds along rings that it finds by the links between the GPUs of a node. Workers whose GPUs are
linked in another way may round the mean of a gradient in another way, so they are of another kind.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import socket
import struct
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from elastic_dp.cluster.worker import WorkerJob
from elastic_dp.config import ScalingConfig
from elastic_dp.device.gpu import backends_of_mesh, is_gpu
from elastic_dp.device.nccl_communicator import options_of_mesh
from elastic_dp.distributed.process_group import OPERATION_TIMEOUT, prove
from elastic_dp.errors import ClusterError
from elastic_dp.train.gang import Gang

_INTERFACE = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915
# Elements that are added. By the size NCCL chooses how many rings share the work.
_SIZES = (1 << 12, 1 << 18, 1 << 24)


def open_mesh(
    store: dist.Store,
    name: str,
    job: WorkerJob,
    number: int,
    scaling: ScalingConfig,
    device: torch.device,
    address: str | None,
) -> DeviceMesh:
    """Makes torch's default process group of the processes of a worker, each with its `device`.
    Returns the mesh of it. `address`: of this node.

    They meet in the `store`, and prove to each other that they hold the secret of the run. No other
    mesh has the same `name`. The mesh lives as long as the process, and its collectives cannot be
    aborted.
    Raises ConnectionError if a peer does not hold the secret, and ClusterError if the GPUs cannot
    be connected, or no interface has the address.
    """
    connects, size = is_gpu(device) and not job.shares_gpu, scaling.processes_per_worker
    several = address is not None and scaling.nodes_per_worker > 1
    try:
        with _on_interface(interface_of(str(address)) if several else "lo"):
            # If a peer dies, this process ends.
            dist.init_process_group(
                backends_of_mesh(device, shared=job.shares_gpu),
                store=store,
                rank=number,
                world_size=size,
                timeout=OPERATION_TIMEOUT,
                device_id=device if connects else None,  # connects at once
                pg_options=options_of_mesh(OPERATION_TIMEOUT) if connects else None,
            )
    except RuntimeError as error:
        if not connects:
            raise
        first = str(error).partition("\n")[0]
        raise ClusterError(f"the GPUs of a worker cannot be connected: {first}") from error
    group = dist.group.WORLD
    assert group is not None
    backend = group._get_backend(torch.device("cpu"))
    prove(backend, job.secret, name, rank=number, world_size=size)
    # Not `init_device_mesh`, which would make a second group where torch finds a GPU.
    return DeviceMesh.from_group(group, device.type, mesh_dim_names=("dp",))


def interface_of(address: str) -> str:
    """Returns the name of the network interface with this IPv4 address. Raises ClusterError."""
    for _, name in socket.if_nameindex():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as made, contextlib.suppress(OSError):
            found = fcntl.ioctl(made, _SIOCGIFADDR, struct.pack("256s", name.encode()))
            if socket.inet_ntoa(found[20:24]) == address:
                return name
    raise ClusterError(f"no network interface of this node has the IPv4 address {address}")


@contextlib.contextmanager
def _on_interface(name: str) -> Iterator[None]:
    """A context in which Gloo listens on this interface only."""
    before = os.environ.get(_INTERFACE)
    os.environ[_INTERFACE] = name
    try:
        yield
    finally:
        if before is None:
            del os.environ[_INTERFACE]
        else:
            os.environ[_INTERFACE] = before


def kind_of_gang(gang: Gang, own: str, device: torch.device) -> str:
    """Returns the kind of the worker. All processes call it. Raises ClusterError if they differ."""
    kinds = dict.fromkeys(told.decode() for told in gang.control.exchange(own.encode()))
    if len(kinds) > 1:
        raise ClusterError(
            "the processes of a worker must have GPUs of one kind, and these differ: "
            f"{' | '.join(kinds)}. Keep such nodes out with ScalingConfig.label_selector"
        )
    if not is_gpu(device):
        return own
    digest = hashlib.blake2b(b"".join(gang.control.exchange(_sums(gang, device))), digest_size=4)
    return f"{own}; sums of {gang.size} processes {digest.hexdigest()}"


@torch.no_grad()
def _sums(gang: Gang, device: torch.device) -> bytes:
    """Returns a digest of this process's parts of sums over all, added as by `fully_shard`."""
    # The former name is deprecated from torch 2.13 on, which has the new one.
    reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    draws = torch.Generator().manual_seed(gang.number)
    digest = hashlib.blake2b(digest_size=16)
    for numel in _SIZES:
        part = torch.empty(numel // gang.size, device=device)
        given = torch.randn(len(part) * gang.size, generator=draws).to(device)
        reduce_scatter(part, given, op=dist.ReduceOp.AVG, group=gang.mesh.get_group())
        digest.update(part.cpu().numpy().tobytes())
    return digest.digest()
