"""Compares the fields of the optimizer's parameter groups among the members, in each step.

The loop's body may set them (`group["lr"] *= 0.1`). If it decides so by something that a worker
that joined lacks, the next step would give the members different weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from numbers import Real
from typing import Any

import torch
import xxhash

from elastic_dp.errors import LoopError

Fields = list[list[list[Any]]]  # by group: name and value of each field


def fields_of(optimizers: Iterable[torch.optim.Optimizer]) -> Fields:
    """Returns the fields that are numbers, strings, None, or lists and tuples of them."""
    return [
        [
            [key, plain]
            for key, value in group.items()
            if key != "params" and (plain := _plain(value)) is not ...
        ]
        for optimizer in optimizers
        for group in optimizer.param_groups
    ]


def digest_of(fields: Fields) -> str:
    return xxhash.xxh3_64_hexdigest(repr(fields).encode())


def record_of(fields: Fields, joined_after: int) -> bytes:
    """Returns what a member sends where digests differ. `joined_after`: the step with whose state
    it began."""
    return json.dumps({"joined": joined_after, "fields": fields}).encode()


def groups_differ(step: int, records: Sequence[bytes], workers: Sequence[str]) -> LoopError:
    """Returns the error for members whose records differ."""
    told = [json.loads(record) for record in records]
    other, number, key = next(
        (rank, number, key)
        for rank, one in enumerate(told)
        for number, pair in enumerate(zip(told[0]["fields"], one["fields"], strict=True))
        for key in _differing(*pair)
    )
    values = [dict(told[rank]["fields"][number]).get(key) for rank in (0, other)]
    since = [_since(told[rank]["joined"]) for rank in (0, other)]
    return LoopError(
        f"before step {step} optimizer.param_groups[{number}][{key!r}] is {values[0]!r} on worker "
        f"{workers[0]}, {since[0]}, and {values[1]!r} on worker {workers[other]}, {since[1]}. The "
        "body of the loop over ctx.steps sets it by something that a worker that joins begins "
        "anew, such as a counter: keep that in c = ctx.carry(count=0) before the loop, and pass "
        "objects, such as a scheduler, as state="
    )


def _differing(one: list[list[Any]], other: list[list[Any]]) -> list[str]:
    first, second = dict(one), dict(other)
    return [key for key in first | second if repr(first.get(key)) != repr(second.get(key))]


def _since(joined_after: int) -> str:
    return f"which joined after step {joined_after}" if joined_after else "here from the start"


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        on_host = value.device.type == "cpu" and value.numel() == 1
        return value.item() if on_host else ...
    if isinstance(value, str | bool | None):
        return value
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, list | tuple):
        plain = [_plain(item) for item in value]
        return ... if ... in plain else plain
    return ...
