"""The device on which a process of a worker trains."""

from __future__ import annotations

import socket
from collections.abc import Mapping

import torch

from elastic_dp.device.gpu import first_gpu, sees_other_gpus, why_no_gpu
from elastic_dp.errors import ClusterError


def pick_device(resources: Mapping[str, float]) -> torch.device:
    """Return the GPU if the worker, or this process of it, was given one, else the CPU.

    Raises ClusterError if torch does not see the GPU: training on the CPU instead would be a
    hundred times slower, with a backend that only moves CUDA tensors. And if the first GPU that it
    sees may be another worker's.
    """
    gpus = resources.get("GPU", 0)
    if gpus <= 0:
        return torch.device("cpu")
    gpu = first_gpu()
    if gpu is not None:
        if sees_other_gpus():
            raise ClusterError(
                "CUDA shows this process other GPUs than its own, because a module asked for them "
                "before Ray gave the process to this worker. See that no module asks when it is "
                "imported"
            )
        return gpu
    raise ClusterError(
        f"scaling.resources_per_worker asks for {gpus:g} GPU, but torch finds no CUDA device on "
        f"{socket.gethostname()}: {why_no_gpu()}. To train on the CPU, set "
        "scaling.resources_per_worker.GPU=0"
    )
