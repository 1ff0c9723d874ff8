"""What is different in a step where a worker has several processes."""

from __future__ import annotations

import dataclasses
import math
import struct
from collections.abc import Mapping, Sequence

import torch

from elastic_dp.distributed.gradient_norm import gradient_square
from elastic_dp.distributed.gradient_order import GradientOrder
from elastic_dp.distributed.gradient_reducer import GradientReducer
from elastic_dp.distributed.gradient_units import UnitLayout
from elastic_dp.errors import LossError, ModelError
from elastic_dp.train.gang.gang import Gang
from elastic_dp.train.step.micro_batch import MicroBatchResult
from elastic_dp.train.step.step_header import MemberHeader, StepHeader


def refuse_none(gang: Gang | None, step: int, virtual_worker: int) -> None:
    """Raises LossError where a process of a gang has no loss to run backward from: the others would
    wait for it."""
    if gang is not None:
        raise LossError(
            f"virtual worker {virtual_worker} has no gradient in step {step} on process "
            f"{gang.number} of its worker: its weight is 0, its loss is not finite, or its rows "
            "cannot be decoded. The other processes wait for its part of the backward pass, so "
            "each micro-batch needs one; return a loss of 0 that depends on the model"
        )


def refuse_change(gang: Gang | None, step: int) -> None:
    """Raises ModelError where a buffer of a gang's model has changed."""
    if gang is not None:
        raise ModelError(
            f"a buffer of the model changed in step {step}, as those of batch normalization do, "
            "and each process of a worker has its own: use layers without such buffers, or "
            "processes_per_worker=1"
        )


def record_of_gang(
    gang: Gang | None, step: int, header: MemberHeader, order: GradientOrder | None
) -> bytes:
    """Returns the record of this member: that of all processes of its worker together. Raises
    ModelError if their gradients came in different orders, and LossError if the same rows have
    given them different losses."""
    if gang is None:
        return header.to_bytes()
    assert order is not None
    results = {gang.loss_number(v): result for v, result in header.results.items()}
    mine = dataclasses.replace(header, results=results).to_bytes()
    used, changed, digest = len(header.used), len(header.changed), order.digest()
    told = gang.exchange(digest + mine)
    if len({one[: len(digest)] for one in told}) > 1:
        raise ModelError(
            "the processes of a worker have got the gradients of this step in different orders: "
            "the model runs other layers for other rows. torch pairs what the processes send by "
            "its order, so all must run the same layers in the same order"
        )
    records = [one[len(digest) :] for one in told]
    if gang.compares:
        _check_losses(step, [StepHeader.of([one], used, changed) for one in records])
    # Of what several processes have, that of the first one counts.
    whole = StepHeader.of(records[::-1], used, changed)
    weights = [digest for digest in whole.weights if digest is not None]
    return MemberHeader(
        late=whole.late,
        used=whole.used,
        changed=bytes(i in whole.changed for i in range(changed)),
        results=whole.results,
        stop=whole.stop,
        keep=whole.keep,
        keeps_late=whole.keeps_late,
        bad=whole.bad,
        weights=" ".join(weights) or None,
        groups=header.groups,
        connected=None if header.connected is None else whole.connected,
        why_not=whole.why_not,
    ).to_bytes()


def _check_losses(step: int, headers: Sequence[StepHeader]) -> None:
    found: dict[int, tuple[int, MicroBatchResult]] = {}
    for number, header in enumerate(headers):
        for key, other in header.results.items():
            first, one = found.setdefault(key, (number, other))
            if (one.loss, one.weight) != (other.loss, other.weight):
                raise LossError(
                    f"the loss of step {step} on virtual worker {key} is {one.loss} (weight "
                    f"{one.weight:g}) on process {first} of its worker, and {other.loss} (weight "
                    f"{other.weight:g}) on process {number}. With tensor_parallel_size they have "
                    "the same rows, so their losses must be equal: gather what is sharded before "
                    "the loss is taken, and draw the same random numbers. If earlier steps had no "
                    "such difference, a machine may be faulty: start the run again"
                )


def check_replicated(
    gang: Gang | None, step: int, parameters: Mapping[str, torch.Tensor], sums: GradientReducer
) -> None:
    """Raises ModelError if processes of a worker have the same rows, and other gradients for a
    parameter that is not divided among them. All processes call it."""
    if gang is not None and gang.compares:
        names = {p: name for name, p in parameters.items()}
        name = gang.differing({names[p]: sum_ for p, sum_ in sums.totals()}, parameters)
        if name is not None:
            raise ModelError(
                f"the processes of a worker have different gradients for model.{name} in step "
                f"{step}, which tensor parallelism does not shard: it is used on a part of the "
                "features, heads or positions, as a normalization of single heads is. Include it "
                "in the plan of parallelize_module, so that torch adds up its gradient"
            )


def clip_gang(
    gang: Gang,
    units: UnitLayout,
    gradients: Sequence[torch.Tensor | None],
    counts: Sequence[bool],
    limit: float | None,
) -> float:
    """Returns the norm of a gradient of which each process has a part, and scales the parts to a
    norm of at most `limit`. All processes call it: the squares of their parts are added in order.
    `counts` says which gradients this process adds.
    """
    own = [g if one else None for g, one in zip(gradients, counts, strict=True)]
    square = struct.pack("<d", gradient_square(units, own))
    squares = [struct.unpack("<d", given)[0] for given in gang.exchange(square)]
    norm = torch.tensor(math.sqrt(sum(squares)))
    present = [g for g in gradients if g is not None]
    if limit is not None and present:
        factor = torch.clamp(limit / (norm + 1e-6), max=1.0)  # as torch.nn.utils does
        torch._foreach_mul_(present, factor.to(present[0].device))
    return float(norm)
