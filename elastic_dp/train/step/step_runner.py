"""One optimizer step, as a transaction: everything up to the commit can be undone, everything after it cannot fail.

    for each of my virtual workers: same buffers, own random numbers, forward, backward
        (gradients are added and sent while the last backward runs)
    launch   my header: losses, weights, metrics, wishes to stop, which parameters were used, which buffers changed
    sums     of my part of the gradient, sent out bucket by bucket
    header   of all, collected: whether all go on, stop, or do the step again
    gather   changed buffers of all; finished parts of all
    commit   one compare-and-swap that excludes an abort
    apply    gradients assigned, clipped, optimizer, scheduler, buffers

A step has its header even where nothing needs a gradient, so nobody completes one that somebody did not enter:
two members differ by one step at most. The mean over the global batch costs no pass over the gradient: each loss is
divided by the weight expected of all (their rows), which only where the loss function gave others is made good
afterwards. Whether the gradient is finite needs no vote: it has the same bits on all.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack
import torch

from elastic_dp.data.generators import seed_everything
from elastic_dp.distributed.gradient_sum import GradientSum
from elastic_dp.distributed.process_group import ProcessGroup
from elastic_dp.distributed.record_gather import RecordGather
from elastic_dp.distributed.reduction_tree import Node, fold
from elastic_dp.errors import LossError
from elastic_dp.sampling.seeds import batch_seed, body_seed, seed_for
from elastic_dp.train.exactness.purity_probe import (
    Facts,
    ProbeOutcome,
    attributes_of,
    facts_of,
    probe,
)
from elastic_dp.train.generations.worker_control import WorkerControl
from elastic_dp.train.state.step_buffers import StepBuffers
from elastic_dp.train.state.step_record import StepRecord
from elastic_dp.train.state.train_state import TrainState
from elastic_dp.train.state.weight_comparison import WeightComparison
from elastic_dp.train.step.batch_source import BatchSource
from elastic_dp.train.step.compute_speed import ComputeSpeed
from elastic_dp.train.step.loss_result import LEAST_WEIGHT, mean, parse_loss

LossFn = Callable[[Any, Any], Any]


@dataclass(frozen=True, slots=True)
class StopAgreed:
    """Somebody asked for the end in this step's header: nobody commits it."""

    reason: str


@dataclass(frozen=True, slots=True)
class Redo:
    """A parameter fired twice in one backward: nobody commits, all redo the step more carefully."""


@dataclass(slots=True)
class MicroBatchResult:
    """What one virtual worker's forward pass gave."""

    loss: float
    weight: float
    metrics: dict[str, float]


@dataclass
class StepRunner:
    """Runs steps for one session; `group` and `shares` are set anew in each generation."""

    state: TrainState
    weights: WeightComparison
    loss_fn: LossFn
    data: BatchSource
    virtual_workers: int
    device: torch.device
    exact: bool
    clip_norm: float | None
    precision: str | None
    seed: int
    control: WorkerControl
    report: Callable[[str], None]  # tells the phase
    pass_point: Callable[[str, int], None]  # see fault_injection.py
    speed: ComputeSpeed
    _group: ProcessGroup | None = None
    _shares: list[Node] = field(default_factory=list)
    # Of the last committed step, while they are still there.
    _gradients: list[torch.Tensor] | None = None
    _tries = _writes_back = (
        False  # runs the micro-batch before the first step; see `_check_written`
    )

    def __post_init__(self) -> None:
        self.gradients = GradientSum(self.state.parameters)
        self.buffers = StepBuffers(self.state.model)

    def open(self, group: ProcessGroup, shares: Sequence[Node]) -> None:
        self._group, self._shares = group, list(shares)
        self._header, self._values = RecordGather(group), RecordGather(group)
        self.gradients.open(group, shares, self.virtual_workers, self.exact)
        self.speed.open()

    def warm_up(self) -> None:
        """Run one micro-batch and forget it, so that a group need not wait while this worker compiles the model,
        chooses kernels, and touches memory for the first time.

        What user code raises here it raises again in a step, unless this model is refused before that.
        """
        with contextlib.suppress(Exception):
            self._run_once(self._batch(1, self._largest()))
        self._undo(tried=True)
        self.report("start")

    def probe(self, because: list[str], say: Callable[[str], None]) -> None:
        """The same, twice, by whoever gives the others their state. Raises DataError and LossError; see `probe.py`."""
        try:
            probe(self, because, say)
        finally:
            self._undo()
            self.report("start")

    def try_out(self) -> ProbeOutcome | None:
        """Implements `ProbeTarget`."""
        batch = self._batch(1, self._largest())
        rows = facts_of("batch", batch)
        leaf = self._run_once(batch)
        if leaf is None:
            return None
        model = self.state.model
        result = facts_of("the loss", leaf.loss) | facts_of("its weight", leaf.weight)
        for name, p in self.state.parameters.items():
            result |= facts_of(f"the gradient of model.{name}", p.grad)
        for name, buffer in model.named_buffers():
            result |= facts_of(f"the buffer model.{name}", buffer)
        left, kept = self.holds()
        self._undo(tried=True)
        return ProbeOutcome(rows, result, left, kept, facts_of("metrics", leaf.metrics))

    def holds(self) -> tuple[Facts, Facts]:
        """Implements `ProbeTarget`."""
        left: Facts = {}
        for name, p in self.state.parameters.items():
            left |= facts_of(f"model.{name}", p)
        for number, group in enumerate(self.state.optimizer.param_groups):
            for key, value in group.items():
                if key != "params":
                    left |= facts_of(f"optimizer.param_groups[{number}][{key!r}]", value)
        return left, attributes_of(self.state.model, self.loss_fn)

    def _largest(self) -> int:
        return max(range(self.virtual_workers), key=lambda v: self.data.rows(1, v))

    def _run_once(self, batch: Any) -> MicroBatchResult | None:
        self.gradients.drop()  # those that the user's code has left before the loop
        v = self._largest()
        self._tries = True
        try:
            loss, leaf = self._forward(batch, 1, v, float(self.data.rows(1, v)))
        finally:
            self._tries = False
        if loss is None:
            return None
        loss.backward()
        return leaf

    def close(self) -> None:
        """Undo what is not committed and let go of the group."""
        self._gradients = None  # the next generation may use their memory
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
        self._gradients = None
        self.gradients.begin()
        self.speed.begin()
        outcomes = self._run_mine(step, stop, expected)
        self.report("collective")
        self.gradients.send()
        self.pass_point("sent", step)
        lengths = self._launch_header(step, outcomes, stop)
        self.pass_point("exchange", step)
        self.gradients.reduce()  # while the last bucket and the header are on their way
        self.pass_point("gather", step)
        heard = self._collect_headers(step, *lengths)
        if heard.stop is not None:
            self._undo()
            self.control.commit()
            return StopAgreed(heard.stop)
        if heard.late:
            self.gradients.settle()
            self.gradients.sequential = True
            self._undo()
            return Redo()
        if heard.bad:
            self.data.check_bad(self.state.bad_row_groups | heard.bad)
        leaves = self._counting(step, heard.leaves)
        weight = math.fsum(leaf.weight for leaf in leaves.values())
        if 0 < weight < LEAST_WEIGHT:
            raise LossError(
                f"the weights of step {step} add up to {weight:g}, too little to divide gradients by: what counts is how "
                "they relate to each other, so multiply all of them"
            )
        loss_scale = self.state.loss_scale
        factor = (expected / weight if weight else 1.0) / (loss_scale.scale if loss_scale else 1.0)
        buffers = self._exchange_buffers(step, heard.changed)
        finite = self.gradients.complete(factor)
        if not finite and loss_scale is None:
            raise LossError(
                f"the gradient of step {step} is not finite although every loss is; the rows were: "
                + "; ".join(self.data.describe(step, v) for v in sorted(leaves)[:4])
            )
        group.synchronize()
        self.speed.end_step()
        self.pass_point("before_commit", step)
        self.control.commit()
        self.pass_point("after_commit", step)
        self.state.bad_row_groups |= heard.bad
        self.data.mark_bad(heard.bad)
        record = self._apply(step, leaves, weight, finite, heard.used, buffers)
        record.late = heard.keeps_late
        if heard.keep and not heard.keeps_late:
            record.kept = True
            self.control.checkpoint_agreed()
        return record

    # ------------------------------------------------------------------- up to the commit

    def _run_mine(
        self, step: int, stop: str | None, expected: float
    ) -> dict[int, MicroBatchResult]:
        """Run my virtual workers, forward and backward."""
        assert self._group is not None
        mine = fold(*self._shares[self._group.rank], self.virtual_workers)
        outcomes: dict[int, MicroBatchResult] = {}
        for i, leaf in enumerate(mine):
            is_last = i == len(mine) - 1
            v = leaf.virtual_worker
            self.control.may_continue()
            self.gradients.before_leaf(leaf, is_last)
            loss = None
            if stop is None and self.data.rows(step, v) > 0:
                self.pass_point("before_forward", step)
                batch = self._batch(step, v)
                loss, outcomes[v] = self._forward(batch, step, v, expected)
                self.pass_point("forward", step)
                self.gradients.before_backward()
            if loss is not None:
                self.pass_point("backward", step)
                loss.backward()
            self.buffers.after_leaf(v, contributes=loss is not None)
            self.gradients.after_leaf(leaf, is_last)
            self.speed.end_micro_batch()
        return outcomes

    def _batch(self, step: int, v: int) -> Any:
        seed_everything(batch_seed(self.seed, step, v))  # a transform draws here, or in a process
        self.report(f"data {v}")
        return to_device(self.data.batch(step, v), self.device)

    def _forward(
        self, batch: Any, step: int, v: int, expected: float
    ) -> tuple[torch.Tensor | None, MicroBatchResult]:
        """The scaled loss to run backward from, or None where the weight is 0."""
        self.report(f"compute {v}")
        seed_everything(seed_for(self.seed, step, v))
        if batch is None:  # all its rows lie in bad row groups
            return None, MicroBatchResult(0.0, 0.0, {})
        self.speed.start_micro_batch()
        # Where the whole loop is under autocast, weights as they were, or without a gradient, would be used again.
        torch.clear_autocast_cache()
        loop_body_guard = self.state.loop_body_guard
        versions = loop_body_guard.versions()
        with loop_body_guard.in_loss(), autocast(self.precision, self.device):
            returned = self.loss_fn(self.state.model, batch)
        written = loop_body_guard.written_since(versions)
        if written is not None:
            self._check_written(written)
        rows = self.data.rows(step, v) - self.data.masked(step, v)
        loss, weight, metrics = parse_loss(returned, rows)
        leaf = MicroBatchResult(float(loss.detach()), weight, metrics)
        if weight == 0.0:
            return None, leaf
        if not math.isfinite(leaf.loss) and self.state.loss_scale is None:
            return None, leaf  # the header tells all; they raise together
        if not loss.requires_grad:
            raise LossError(
                f"the loss of step {step} on virtual worker {v} has no gradient: it was detached, made under no_grad, "
                "or depends on no parameter that requires one. Return it with the weight 0 to leave the micro-batch out"
            )
        scale = weight / expected
        if self.state.loss_scale is not None:
            scale *= self.state.loss_scale.scale
        return loss * scale, leaf

    def _check_written(self, name: str) -> None:
        """The loss function has written to a parameter. Raises LossError, unless it did so before the first step, too:
        there all values are compared, so it writes them back."""
        self._writes_back |= self._tries
        if self.exact and not self._writes_back:
            raise LossError(
                f"the loss function changed model.{name}. It may run more than once for a step, and each worker runs it for "
                "its own micro-batches: change parameters by the optimizer; several may be one, that holds the others"
            )

    def _launch_header(
        self, step: int, outcomes: Mapping[int, MicroBatchResult], stop: str | None
    ) -> tuple[int, int]:
        """How many flags it has for parameters, and for buffers: as many as the others' have."""
        bad = frozenset[int]().union(*(self.data.bad_row_groups(step, v) for v in outcomes))
        said = {
            "v": [(v, x.loss, x.weight, x.metrics) for v, x in outcomes.items()],
            "stop": stop,
            "keep": self.control.checkpoint_wanted,
            "keeps_late": self.control.checkpoint_late,
            "bad": sorted(bad - self.state.bad_row_groups),
        }
        digest = self.weights.digest(step - 1)
        if digest is not None:
            said["weights"] = digest
        used, changed = self.gradients.used, self.buffers.changed()
        self._header.launch(
            bytes([self.gradients.late])
            + used
            + changed
            + msgpack.packb(said, unicode_errors="surrogatepass")
        )
        self.pass_point("header", step)
        return len(used), len(changed)

    def _collect_headers(self, step: int, used: int, changed: int) -> StepHeader:
        size = 1 + used + changed
        records = self._header.collect()
        either = _or([record[:size] for record in records])
        texts = [
            msgpack.unpackb(record[size:], unicode_errors="surrogatepass") for record in records
        ]
        self.weights.compare(step - 1, [text.get("weights") for text in texts])
        return StepHeader(
            stop=next((text["stop"] for text in texts if text["stop"]), None),
            late=bool(either[0]),
            used=either[1 : 1 + used],
            changed=[i for i, flag in enumerate(either[1 + used :]) if flag],
            keep=any(text["keep"] for text in texts),
            keeps_late=any(text["keeps_late"] for text in texts),
            bad=frozenset(group for text in texts for group in text["bad"]),
            leaves={
                v: MicroBatchResult(loss, weight, m) for t in texts for v, loss, weight, m in t["v"]
            },
        )

    def _counting(
        self, step: int, leaves: Mapping[int, MicroBatchResult]
    ) -> dict[int, MicroBatchResult]:
        """Those that have a weight, in the order of virtual workers. Raises LossError."""
        for v in sorted(leaves):
            leaf = leaves[v]
            if leaf.weight and not math.isfinite(leaf.loss) and self.state.loss_scale is None:
                raise LossError(
                    f"the loss of step {step} is {leaf.loss} on virtual worker {v} "
                    f"({self.data.describe(step, v)}). Give such a micro-batch the weight 0 to leave it out"
                )
        return {v: leaves[v] for v in sorted(leaves) if leaves[v].weight}

    def _exchange_buffers(self, step: int, changed: list[int]) -> dict[int, torch.Tensor | bytes]:
        if not changed:
            return {}
        self._values.launch(self.buffers.payload(changed))
        self.pass_point("buffers", step)
        return self.buffers.combine(self._values.collect(), changed, self.virtual_workers)

    def _undo(self, *, tried: bool = False) -> None:
        self.gradients.drop()
        self.buffers.undo(tried=tried)

    # ---------------------------------------------------------------------- from the commit

    def _apply(
        self,
        step: int,
        leaves: Mapping[int, MicroBatchResult],
        weight: float,
        finite: bool,
        used: Sequence[int],
        buffers: Mapping[int, torch.Tensor | bytes],
    ) -> StepRecord:
        self.report("apply")
        state = self.state
        record = StepRecord(
            number=step,
            epoch=self.data.epoch_of(step),
            epoch_end=self.data.ends_epoch(step),
            loss=mean([(leaf.loss, leaf.weight) for leaf in leaves.values()]),
            weight=weight,
            metrics=_mean_metrics(leaves.values()),
            lr=float(state.optimizer.param_groups[0]["lr"]),
        )
        seed_everything(body_seed(self.seed, step))
        self._gradients = self.gradients.assign(used)
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
        # A member that takes the step over has no gradients for its body, so nobody's body has any.
        self.gradients.drop()
        state.record = record
        state.note_commit()
        self.pass_point("after_step", step)
        return record

    def grad_norm(self) -> float | None:
        """Of the last committed step, while its gradients are still there."""
        if self._gradients is None:
            return None
        return float(torch.nn.utils.get_total_norm(self._gradients))


@dataclass(frozen=True, slots=True)
class StepHeader:
    """What the headers of all ranks say together."""

    stop: str | None
    late: bool  # a hook fired twice somewhere
    used: bytes  # per parameter of the layout, whether any virtual worker gave it a gradient
    changed: list[int]  # indices of buffers that any virtual worker changed
    keep: bool  # somebody wants a checkpoint of this step
    keeps_late: bool  # somebody's last checkpoint is still being written: not yet
    bad: frozenset[int]  # row groups that some member could not decode, and no step before recorded
    leaves: dict[int, MicroBatchResult]  # by virtual worker


# --------------------------------------------------------------------------------------------- parts


def _or(rows: Sequence[bytes]) -> bytes:
    """Byte by byte; rows of one length."""
    either = 0
    for row in rows:
        either |= int.from_bytes(row, "little")
    return either.to_bytes(len(rows[0]), "little")


def _mean_metrics(leaves: Any) -> dict[str, float]:
    """Over the micro-batches that reported each."""
    by_name: dict[str, list[tuple[float, float]]] = {}
    for leaf in leaves:
        for name, value in leaf.metrics.items():
            by_name.setdefault(name, []).append((value, leaf.weight))
    return {name: mean(values) for name, values in by_name.items()}


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
