"""One optimizer step, as a transaction: everything up to the commit can be undone, everything after it cannot fail.

    for each of my virtual workers: same buffers, own random numbers, forward, backward
        (gradients are added and sent while the last backward runs)
    header   of all: losses, weights, metrics, wishes to stop, which parameters were used, which buffers changed
    sums     of my part of the gradient
    gather   finished parts of all; changed buffers of all
    commit   one compare-and-swap that excludes an abort
    apply    gradients assigned, clipped, optimizer, scheduler, buffers

A step has its header even where nothing needs a gradient, so nobody completes one that somebody did not enter:
two members differ by one step at most. The mean over the global batch costs no pass over the gradient: each loss is
divided by the weight expected of all (their rows), which only where the loss function gave others is made good
afterwards. Whether the gradient is finite needs no vote: it has the same bits on all.
"""

from __future__ import annotations

import contextlib
import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from elastic_dp.distributed.gradients import GradientSum
from elastic_dp.distributed.header import Header
from elastic_dp.distributed.process_group import ProcessGroup
from elastic_dp.distributed.tree import Node, fold
from elastic_dp.errors import LossError
from elastic_dp.sampling.seeds import body_seed, seed_for
from elastic_dp.train.buffers import StepBuffers
from elastic_dp.train.control import Control
from elastic_dp.train.state import StepRecord, TrainState

LossFn = Callable[[Any, Any], Any]


class BatchSource(Protocol):
    """What a step needs of a data set; see `elastic_dp.data`."""

    fingerprint: str
    steps_per_epoch: int

    def epoch_of(self, step: int) -> int: ...
    def ends_epoch(self, step: int) -> bool: ...
    def rows(self, step: int, virtual_worker: int) -> int: ...
    def batch(self, step: int, virtual_worker: int) -> Any: ...
    def describe(self, step: int, virtual_worker: int) -> str: ...
    def read_ahead(self, step: int, virtual_workers: Sequence[int]) -> None: ...


@dataclass(frozen=True, slots=True)
class StopAgreed:
    """Somebody asked for the end in this step's header: nobody commits it."""

    reason: str


@dataclass(frozen=True, slots=True)
class Redo:
    """A parameter fired twice in one backward: nobody commits, all redo the step more carefully."""


@dataclass(slots=True)
class _Leaf:
    """What one virtual worker's forward pass gave."""

    loss: float
    weight: float
    metrics: dict[str, float]


@dataclass
class Stepper:
    """Runs steps for one session; `group` and `shares` are set anew in each generation."""

    state: TrainState
    loss_fn: LossFn
    data: BatchSource
    virtual_workers: int
    device: torch.device
    exact: bool
    clip_norm: float | None
    precision: str | None
    seed: int
    control: Control
    report: Callable[[str], None]  # tells the phase
    pass_point: Callable[[str, int], None]  # see `faults`
    _group: ProcessGroup | None = None
    _shares: list[Node] = field(default_factory=list)
    _intact: bool = False  # the gradients of the last committed step are still assigned

    def __post_init__(self) -> None:
        self.gradients = GradientSum(list(self.state.parameters.values()))
        self.buffers = StepBuffers(self.state.model)

    def open(self, group: ProcessGroup, shares: Sequence[Node], next_step: int) -> None:
        self._group, self._shares = group, list(shares)
        self._header, self._values = Header(group), Header(group)
        self.gradients.open(group, shares, self.virtual_workers, self.exact)
        self.data.read_ahead(next_step, range(*shares[group.rank]))

    def warm_up(self) -> None:
        """Run one micro-batch and forget it, so that a group need not wait while this worker compiles the model,
        chooses kernels, and touches memory for the first time.

        What user code raises here it raises again in a step, unless this model is refused before that.
        """
        v = max(range(self.virtual_workers), key=lambda v: self.data.rows(1, v))
        with contextlib.suppress(Exception):
            loss, _ = self._forward(1, v, float(self.data.rows(1, v)))
            if loss is not None and loss.requires_grad:
                loss.backward()
        self._undo()

    def close(self) -> None:
        """Undo what is not committed and let go of the group."""
        if not self._intact:
            self.gradients.drop()
        self.gradients.close()
        self.buffers.undo()
        self._group = None

    def attempt(self, step: int) -> StepRecord | StopAgreed | Redo:
        """Raises GroupError when the step could not be completed; then nothing was applied."""
        group = self._group
        assert group is not None
        totals = [self.data.rows(step, v) for v in range(self.virtual_workers)]
        expected = float(sum(totals))
        stop = self.control.stop_reason
        self.report("compute")
        self._intact = False
        self.gradients.begin()
        outcomes = self._run_mine(step, stop, expected)
        self.report("collective")
        self.gradients.send()
        self.pass_point("sent", step)
        heard = self._exchange_headers(step, outcomes, stop)
        if heard.stop is not None:
            self._undo()
            self.control.commit()
            return StopAgreed(heard.stop)
        if heard.late:
            self.gradients.settle()
            self.gradients.careful = True
            self._undo()
            return Redo()
        leaves = self._counting(step, heard.leaves)
        weight = math.fsum(leaf.weight for leaf in leaves.values())
        self.pass_point("exchange", step)
        loss_scale = self.state.loss_scale
        factor = (expected / weight if weight else 1.0) / (loss_scale.scale if loss_scale else 1.0)
        self.gradients.reduce(factor)
        self.pass_point("gather", step)
        buffers = self._exchange_buffers(step, heard.changed)
        finite = self.gradients.complete(heard.bound * max(1.0, factor))
        if not finite and loss_scale is None:
            raise LossError(
                f"the gradient of step {step} is not finite although every loss is; the rows were: "
                + "; ".join(self.data.describe(step, v) for v in sorted(leaves)[:4])
            )
        group.synchronize()
        self.pass_point("before_commit", step)
        self.control.commit()
        self.pass_point("after_commit", step)
        return self._apply(step, leaves, weight, finite, heard.used, buffers)

    # ------------------------------------------------------------------- up to the commit

    def _run_mine(self, step: int, stop: str | None, expected: float) -> dict[int, _Leaf]:
        """Run my virtual workers, forward and backward."""
        assert self._group is not None
        mine = fold(*self._shares[self._group.rank], self.virtual_workers)
        outcomes: dict[int, _Leaf] = {}
        for i, leaf in enumerate(mine):
            is_last = i == len(mine) - 1
            v = leaf.virtual_worker
            self.control.may_continue()
            self.gradients.before_leaf(leaf, is_last)
            loss = None
            if stop is None and self.data.rows(step, v) > 0:
                self.pass_point("before_forward", step)
                loss, outcomes[v] = self._forward(step, v, expected)
            if loss is not None and loss.requires_grad:
                self.pass_point("backward", step)
                loss.backward()
            self.buffers.after_leaf(v, contributes=loss is not None)
            self.gradients.after_leaf(leaf, is_last)
        return outcomes

    def _forward(self, step: int, v: int, expected: float) -> tuple[torch.Tensor | None, _Leaf]:
        """The scaled loss to run backward from, or None where the weight is 0."""
        seed_everything(seed_for(self.seed, step, v))
        batch = to_device(self.data.batch(step, v), self.device)
        with autocast(self.precision, self.device):
            returned = self.loss_fn(self.state.model, batch)
        self.pass_point("forward", step)
        loss, weight, metrics = parse_loss(returned, self.data.rows(step, v))
        leaf = _Leaf(float(loss.detach()), weight, metrics)
        if weight == 0.0:
            return None, leaf
        if not math.isfinite(leaf.loss) and self.state.loss_scale is None:
            return None, leaf  # the header tells all; they raise together
        scale = weight / expected
        if self.state.loss_scale is not None:
            scale *= self.state.loss_scale.scale
        return loss * scale, leaf

    def _exchange_headers(
        self, step: int, outcomes: Mapping[int, _Leaf], stop: str | None
    ) -> _Heard:
        used, changed = self.gradients.used, self.buffers.changed()
        flags = bytes([self.gradients.late]) + used + changed
        said = {
            "v": [(v, x.loss, x.weight, x.metrics) for v, x in outcomes.items()],
            "stop": stop,
            "bound": self.gradients.bound,
        }
        self._header.launch(flags + json.dumps(said).encode())
        self.pass_point("header", step)
        records = self._header.collect()
        either = _or([record[: len(flags)] for record in records])
        texts = [json.loads(record[len(flags) :]) for record in records]
        return _Heard(
            stop=next((text["stop"] for text in texts if text["stop"]), None),
            late=bool(either[0]),
            used=either[1 : 1 + len(used)],
            changed=[i for i, flag in enumerate(either[1 + len(used) :]) if flag],
            bound=sum(text["bound"] for text in texts),
            leaves={v: _Leaf(loss, weight, m) for t in texts for v, loss, weight, m in t["v"]},
        )

    def _counting(self, step: int, leaves: Mapping[int, _Leaf]) -> dict[int, _Leaf]:
        """Those that have a weight, in the order of virtual workers. Raises LossError."""
        for v in sorted(leaves):
            leaf = leaves[v]
            if leaf.weight and not math.isfinite(leaf.loss) and self.state.loss_scale is None:
                raise LossError(
                    f"the loss of step {step} is {leaf.loss} on virtual worker {v} "
                    f"({self.data.describe(step, v)}). Give such a micro-batch the weight 0 to leave it out"
                )
        return {v: leaves[v] for v in sorted(leaves) if leaves[v].weight}

    def _exchange_buffers(self, step: int, changed: list[int]) -> dict[int, torch.Tensor]:
        if not changed:
            return {}
        self._values.launch(self.buffers.payload(changed))
        self.pass_point("buffers", step)
        return self.buffers.combine(self._values.collect(), changed, self.virtual_workers)

    def _undo(self) -> None:
        self.gradients.drop()
        self.buffers.undo()

    # ---------------------------------------------------------------------- from the commit

    def _apply(
        self,
        step: int,
        leaves: Mapping[int, _Leaf],
        weight: float,
        finite: bool,
        used: Sequence[int],
        buffers: Mapping[int, torch.Tensor],
    ) -> StepRecord:
        self.report("apply")
        state = self.state
        record = StepRecord(
            number=step,
            epoch=self.data.epoch_of(step),
            epoch_end=self.data.ends_epoch(step),
            loss=_mean([(leaf.loss, leaf.weight) for leaf in leaves.values()]),
            weight=weight,
            metrics=_mean_metrics(leaves.values()),
            lr=float(state.optimizer.param_groups[0]["lr"]),
        )
        seed_everything(body_seed(self.seed, step))
        self.gradients.assign(used)
        self.buffers.commit(buffers)
        if finite:
            if self.clip_norm is not None:
                norm = torch.nn.utils.clip_grad_norm_(state.parameters.values(), self.clip_norm)
                record.grad_norm = float(norm)
            self.pass_point("optimizer", step)
            state.optimizer.step()
            if state.scheduler is not None:
                state.scheduler.step()
        if state.loss_scale is not None:
            state.loss_scale.update(overflow=not finite)
        state.record = record
        self._intact = True
        state.note_commit()
        self.pass_point("after_step", step)
        return record

    def grad_norm(self) -> float | None:
        """Of the last committed step, while its gradients are still there."""
        if not self._intact:
            return None
        grads = [p.grad for p in self.state.parameters.values() if p.grad is not None]
        return float(torch.nn.utils.get_total_norm(grads))


@dataclass(frozen=True, slots=True)
class _Heard:
    """What the headers of all ranks say together."""

    stop: str | None
    late: bool  # a hook fired twice somewhere
    used: bytes  # per parameter of the layout, whether any virtual worker gave it a gradient
    changed: list[int]  # indices of buffers that any virtual worker changed
    bound: float  # no element of the gradient's sum is larger
    leaves: dict[int, _Leaf]  # by virtual worker


# --------------------------------------------------------------------------------------------- parts


def parse_loss(returned: Any, rows: int) -> tuple[torch.Tensor, float, dict[str, float]]:
    """What a loss function may return: loss, (loss, weight) or (loss, weight, metrics)."""
    metrics: Mapping[str, Any] = {}
    loss, weight = returned, rows
    if isinstance(returned, tuple):
        if len(returned) not in (2, 3):
            raise LossError(
                f"the loss function returned a tuple of {len(returned)}; it may return loss, "
                "(loss, weight) or (loss, weight, metrics)"
            )
        loss, weight = returned[:2]
        metrics = returned[2] if len(returned) == 3 else {}
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        what = (
            f"a tensor of shape {tuple(loss.shape)}"
            if isinstance(loss, torch.Tensor)
            else f"a {type(loss).__name__}"
        )
        raise LossError(
            f"the loss is {what}, must be a scalar tensor: the mean over the micro-batch, e.g. loss.mean()"
        )
    number = float(weight)
    if not (math.isfinite(number) and number >= 0):
        raise LossError(f"the weight of a micro-batch is {number}, must be finite and not negative")
    return loss.reshape(()), number, {str(key): float(value) for key, value in metrics.items()}


def _or(rows: Sequence[bytes]) -> bytes:
    """Byte by byte; rows of one length."""
    either = 0
    for row in rows:
        either |= int.from_bytes(row, "little")
    return either.to_bytes(len(rows[0]), "little")


def _mean(values: Sequence[tuple[float, float]]) -> float:
    """Weighted mean, added in the order of virtual workers."""
    weight = math.fsum(w for _, w in values)
    return math.fsum(x * w for x, w in values) / weight if weight else math.nan


def _mean_metrics(leaves: Any) -> dict[str, float]:
    """Over the micro-batches that reported each."""
    by_name: dict[str, list[tuple[float, float]]] = {}
    for leaf in leaves:
        for name, value in leaf.metrics.items():
            by_name.setdefault(name, []).append((value, leaf.weight))
    return {name: _mean(values) for name, values in by_name.items()}


def seed_everything(seed: int) -> None:
    """Python's, NumPy's and torch's global generators."""
    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    # Not torch.manual_seed: where a device is not in use yet, it formats a stack trace for it (0.4 ms).
    torch.default_generator.manual_seed(seed % (1 << 63))
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed % (1 << 63))


def to_device(batch: Any, device: torch.device) -> Any:
    """Tensors anywhere in dicts, lists and tuples, and anything else with a `.to` (a BatchEncoding)."""
    if device.type == "cpu":
        return batch
    if isinstance(batch, Mapping) and type(batch) is dict:
        return {key: to_device(value, device) for key, value in batch.items()}
    if type(batch) in (list, tuple):
        return type(batch)(to_device(value, device) for value in batch)
    return batch.to(device, non_blocking=True) if hasattr(batch, "to") else batch


def autocast(precision: str | None, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    if precision in (None, "fp32"):
        return contextlib.nullcontext()
    dtype = torch.bfloat16 if precision == "bf16" else torch.float16
    return torch.autocast(device.type, dtype=dtype)
