"""Runs one micro-batch before the first step and undoes it, to see what user code does and to warm
up. Where virtual workers make inner steps, it is one of these."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from elastic_dp.device.faults import suppress_errors_of_code
from elastic_dp.errors import ModelError
from elastic_dp.train.exactness.facts import Facts, attributes_of, facts_of
from elastic_dp.train.exactness.purity_probe import ProbeOutcome, probe
from elastic_dp.train.gang import Gang
from elastic_dp.train.step.leaf_runner import LeafRunner
from elastic_dp.train.step.micro_batch import LossFn, MicroBatchResult


class TrialRun:
    """A trial of the virtual worker with the most rows."""

    def __init__(
        self,
        leaves: LeafRunner,
        loss_fn: LossFn,
        device: torch.device,
        gang: Gang | None = None,
    ) -> None:
        self.device, self.exact = device, leaves.exact
        self._leaves, self._leaf, self._loss_fn = leaves, leaves.leaf, loss_fn
        self._state, self._buffers = leaves.state, leaves.buffers
        self._written: str | None = None  # see `_watched_gradients`
        # The other processes of a worker wait for one that raises.
        self._tolerates: Callable[[], AbstractContextManager[None]] = (
            suppress_errors_of_code if gang is None else nullcontext
        )

    def warm_up(self) -> None:
        """Runs one micro-batch and undoes it.

        The group then need not wait while this worker compiles the model, chooses kernels, and
        touches memory for the first time. A worker whose code raises here, whose device fails, or
        that has too little memory, does not join.
        """
        for _ in range(2):
            self._run_once(self._batch())
            self._undo(tried=True)
            if not self._buffers.try_again:
                break

    def probe(self, because: list[str], say: Callable[[str], None]) -> None:
        """Runs a micro-batch twice, on the worker that provides the initial state; see
        purity_probe.py.

        Raises DataError, LossError and ModelError.
        """
        try:
            probe(self, because, say, self._tolerates)
            if self._written is not None:
                raise ModelError(
                    f"a hook on the AccumulateGrad node of model.{self._written} writes to its "
                    "gradient, where it would find sums of as many micro-batches as this worker "
                    "happens to run. Use register_hook of the parameter, which sees the gradient "
                    "of each micro-batch, or for that of the step clip_norm=, or "
                    "optimizer.register_step_pre_hook"
                )
        finally:
            self._undo()

    def run_trial(self) -> ProbeOutcome | None:
        """Runs the micro-batch and undoes what it wrote. Returns None if it has no loss."""
        batch = self._batch()
        rows = facts_of("batch", batch)
        with self._watched_gradients():
            result_of_batch = self._run_once(batch)
        if result_of_batch is None:
            return None
        model = self._state.model
        result = facts_of("the loss", result_of_batch.loss) | facts_of(
            "its weight", result_of_batch.weight
        )
        for name, p in self._state.parameters.items():
            result |= facts_of(f"the {self._leaf.makes} of model.{name}", p.grad)
        for name, buffer in model.named_buffers():
            result |= facts_of(f"the buffer model.{name}", buffer)
        left, kept = self.holds()
        self._undo(tried=True)
        return ProbeOutcome(rows, result, left, kept, facts_of("metrics", result_of_batch.metrics))

    def holds(self) -> tuple[Facts, Facts]:
        """Returns the present `ProbeOutcome.left` and `ProbeOutcome.kept`."""
        left: Facts = {}
        for name, p in self._state.parameters.items():
            left |= facts_of(f"model.{name}", p)
        for number, group in enumerate(self._state.optimizer.param_groups):
            for key, value in group.items():
                if key != "params":
                    left |= facts_of(f"optimizer.param_groups[{number}][{key!r}]", value)
        return left, attributes_of(self._state.model, self._loss_fn)

    def _largest(self) -> int:
        return max(range(self._leaves.shares.least), key=lambda v: self._leaves.data.rows(1, v))

    def _batch(self) -> Any:
        return self._leaf.micro_batches.batch(1, self._leaf.first_batch(self._largest()))

    def _run_once(self, batch: Any) -> MicroBatchResult | None:
        self._leaves.gradients.drop()  # those that the user's code has left before the loop
        return self._leaf.try_out(self._largest(), batch)

    @contextmanager
    def _watched_gradients(self) -> Iterator[None]:
        """Notes the name of a parameter whose gradient is written once autograd has added it."""
        came: dict[str, tuple[torch.Tensor, int]] = {}

        def note(name: str, p: torch.Tensor) -> None:
            assert p.grad is not None
            came[name] = p.grad, p.grad._version

        parameters = self._state.parameters.items() if self._leaf.makes == "gradient" else ()
        trained = [(name, p) for name, p in parameters if p.requires_grad]
        hooks = [p.register_post_accumulate_grad_hook(partial(note, name)) for name, p in trained]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        for name, p in trained:
            if name in came and (p.grad is not came[name][0] or p.grad._version != came[name][1]):
                self._written = name

    def _undo(self, *, tried: bool = False) -> None:
        self._leaves.gradients.drop()
        self._buffers.undo(tried=tried)
