"""Buffers of a model that a device holds and the host has not read yet."""

from __future__ import annotations

from dataclasses import dataclass

import torch

BODY = -1  # instead of a virtual worker: the loop body


@dataclass(frozen=True, slots=True)
class UnreadBuffers:
    """What a leaf may have left: `tensors` and `extra` by number; those in `written` it has written
    for certain."""

    tensors: dict[int, torch.Tensor]
    written: set[int]
    extra: dict[int, torch.Tensor | bytes]


def changed_by_body(name: str) -> str:
    return (
        f"the body of the loop over ctx.steps changed the buffer {name!r}, e.g. by "
        "calling the model in training mode: use ctx.evaluate, or call model.eval() "
        "before and model.train() after; keep an average of buffers in a model of its "
        "own and pass it as state="
    )
