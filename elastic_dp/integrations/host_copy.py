"""Copies what is on a device to the host, before a job is sent.

Trainer moves the model to the GPU of the script's process. The controller unpickles the job, too,
and has no GPU.
"""

from __future__ import annotations

import io
from typing import Any

import torch

from elastic_dp import module_pickling


def on_host(module: torch.nn.Module | None, *others: Any) -> tuple[Any, ...]:
    """Returns the module and what refers to its parameters; copies on the host, if the module is
    elsewhere."""
    if module is None or all(tensor.device.type == "cpu" for tensor in module.parameters()):
        return module, *others
    return copied_to_host(module, *others)


def copied_to_host(*parts: Any) -> tuple[Any, ...]:
    """Returns copies on the host, which refer to each other as the originals do."""
    file = io.BytesIO()
    torch.save(parts, file, pickle_module=module_pickling)
    file.seek(0)
    return torch.load(file, map_location="cpu", weights_only=False)
