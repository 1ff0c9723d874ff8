"""Runs one micro-batch before the first step and undoes it, to see what user code does and to warm
up. Where virtual workers make inner steps, it is one of these.

The worker that provides the initial state runs the probe: the micro-batch twice, from the same
weights, buffers, random numbers and rows. A difference comes from something that the code keeps to
itself: a generator of its own, a counter, a clock, a tensor that is not a buffer. On a worker that
joins it is another one, so the job is refused. The error names what differs, and whatever else
changed meanwhile, since that is usually the cause.

Three things are not refused. If kernels may be the reason (on a GPU, or if torch has named an
operation without a deterministic one), the run is not exact, and `Result.inexact_because` says so.
A number that changes each time without changing the result, such as a count of calls for a log,
gives a warning. So does a metric that differs each time, which may show a clock.

Workers that join run code that the probe has tried. What shows only later (another branch after a
thousand steps) cannot be detected this way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from elastic_dp.device.faults import suppress_errors_of_code
from elastic_dp.device.gpu import chooses_kernels_by_time, is_gpu
from elastic_dp.errors import DataError, LossError, ModelError
from elastic_dp.train.exactness.facts import (
    Facts,
    changes_by_micro_batch,
    facts_of,
    facts_of_all,
    kept_by,
    listed,
    with_values,
)
from elastic_dp.train.step.micro_batch import MicroBatchResult

if TYPE_CHECKING:
    from elastic_dp.train.step_builder import StepBuilder

_NAMED = 5  # differences that a message names


@dataclass(frozen=True, slots=True)
class ProbeOutcome:
    """The outcome of one run of a micro-batch."""

    rows: Facts
    result: Facts  # loss, weight, gradients, buffers
    left: Facts  # parameters and hyper-parameters, which a loss function must not write
    kept: Facts  # whatever else the model and the loss function hold
    metrics: Facts = field(default_factory=dict)


class TrialRun:
    """A trial of the virtual worker with the most rows."""

    def __init__(self, build: StepBuilder) -> None:
        self.device, self.exact, self._loss_fn = build.device, build.spec.exact, build.given.loss_fn
        self._leaves, self._leaf = build.leaves, build.leaves.leaf
        self._state, self._buffers = build.state, build.leaves.buffers
        self._written: str | None = None  # see `_watched_gradients`
        self.changing: list[str] = []  # what the probe has seen to change each time
        # The other processes of a worker wait for one that raises.
        self._tolerates: Callable[[], AbstractContextManager[None]] = (
            suppress_errors_of_code if build.gang is None else nullcontext
        )

    def warm_up(self) -> None:
        """Runs one micro-batch and undoes it. The group then need not wait while this worker
        compiles the model, chooses kernels, and touches memory for the first time. A worker whose
        code raises here, whose device fails, or that has too little memory, does not join."""
        for _ in range(2):
            self._run_once(self._batch())
            self._undo(tried=True)
            if not self._buffers.attributes.is_undecided:
                break

    def probe(self, because: list[str], say: Callable[[str], None]) -> None:
        """Runs a micro-batch twice, on the worker that provides the initial state. `because` holds
        the reasons so far why the run is not exact; the probe adds to it. Raises DataError,
        LossError and ModelError."""
        kernels = bool(because) or is_gpu(self.device)  # they may be the reason for a difference
        left: Facts = {}
        kept: Facts = {}
        first = second = None
        try:
            with self._tolerates():  # user code that raises here raises again in a step
                left, kept = self.holds()
                first = self.run_trial()
                second = self.run_trial()
        finally:
            self._undo()
        for text in _settings_undone(self.device) if self.exact else ():
            because.append(text)
            say(f"WARNING: not exact: {text}")
        if first is not None and second is not None:
            changing = self.changing = _differences(first.kept, second.kept)
            error = _judge(left, first, second, _differences(kept, first.kept) or changing)
            results = _differences(first.result, second.result)
            if error is None:
                _warn(_differences(first.metrics, second.metrics), changing, say)
            elif not self.exact:
                say(f"WARNING: {error}")
            elif kernels and results:
                because.append(f"one micro-batch, run twice, gave {_listed(results)}")
                say(f"WARNING: not exact: {because[-1]}. If no kernel is the reason: {error}")
            else:
                raise error
        if self._written is not None:
            raise ModelError(
                f"a hook on the AccumulateGrad node of model.{self._written} writes to its "
                "gradient, where it would find sums of as many micro-batches as this worker "
                "happens to run. Use register_hook of the parameter, which sees the gradient "
                "of each micro-batch, or for that of the step clip_norm=, or "
                "optimizer.register_step_pre_hook"
            )

    def run_trial(self) -> ProbeOutcome | None:
        """Runs the micro-batch and undoes what it wrote. Returns None if it has no loss."""
        batch = self._batch()
        rows = facts_of("batch", batch)
        with self._watched_gradients():
            result = self._run_once(batch)
        if result is None:
            return None
        found: dict[str, Any] = {"the loss": result.loss, "its weight": result.weight}
        for name, p in self._state.parameters.items():
            found[f"the {self._leaf.makes} of model.{name}"] = p.grad
        for name, buffer in self._state.model.named_buffers():
            found[f"the buffer model.{name}"] = buffer
        facts = facts_of_all(found.items())
        left, kept = self.holds()
        self._undo(tried=True)
        return ProbeOutcome(rows, facts, left, kept, facts_of("metrics", result.metrics))

    def holds(self) -> tuple[Facts, Facts]:
        """Returns the present `ProbeOutcome.left` and `ProbeOutcome.kept`."""
        left = {f"model.{name}": p for name, p in self._state.parameters.items()}
        for number, group in enumerate(self._state.optimizer.param_groups):
            for key, value in group.items():
                if key != "params":
                    left[f"optimizer.param_groups[{number}][{key!r}]"] = value
        kept = kept_by(self._state.model, self._loss_fn)
        return facts_of_all(left.items()), facts_of_all(kept)

    def _largest(self) -> int:
        return max(range(self._leaves.shares.least), key=lambda v: self._leaves.data.rows(1, v))

    def _batch(self) -> Any:
        return self._leaf.batch(1, self._leaf.first_batch(self._largest()))

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
        self._buffers.restore(tried=tried)


def _warn(metrics: list[str], changing: list[str], say: Callable[[str], None]) -> None:
    if metrics:
        say(
            f"WARNING: {_listed(metrics)} differs when one micro-batch is run twice, as the "
            "time of a clock does. All workers get the same value, but a step that is "
            "repeated has another one: log it in the loop's body, and let nothing depend on it"
        )
    if changing:
        say(changes_by_micro_batch(_listed(changing)))


def _settings_undone(device: torch.device) -> list[str]:
    """Returns the settings of exact runs that user code has reverted."""
    found = []
    if not torch.are_deterministic_algorithms_enabled():
        found.append("torch.use_deterministic_algorithms was turned off")
    if chooses_kernels_by_time(device):
        found.append("torch.backends.cudnn.benchmark was turned on")
    return found


def _judge(
    before: Facts, first: ProbeOutcome, second: ProbeOutcome, meanwhile: list[str]
) -> DataError | LossError | None:
    if rows := _differences(first.rows, second.rows):
        return DataError(
            f"data gave other values when one micro-batch was read twice: {_listed(rows)}. A "
            "step may be repeated by another worker: draw random numbers from Python's, NumPy's "
            "or torch's global generators, which are seeded for each micro-batch, or from the "
            "rng that DataConfig.transform receives"
        )
    if written := _differences(before, first.left) or _differences(first.left, second.left):
        return LossError(
            f"the loss function changed {_listed(written)}. It may run more than once for a "
            "step, and each worker runs it for its own micro-batches: change parameters by the "
            "optimizer, and its settings in the loop's body; set what depends on the first "
            "batch before the loop"
        )
    if results := _differences(first.result, second.result):
        cause = f" What changed meanwhile: {_listed(meanwhile)}." if meanwhile else ""
        return LossError(
            "one micro-batch of step 1, run twice from the same weights, rows and random "
            f"numbers, gave {_listed(results)}.{cause} The loss must depend on nothing else: draw "
            "from the global generators, which are seeded for each micro-batch, make what "
            "forward changes a buffer, pass what the loop's body changes as state=, and use no "
            "clock; if only its first call differs, call the model once before the loop; or "
            "train with exact=False"
        )
    return None


def _differences(one: Facts, other: Facts) -> list[str]:
    """Returns the names of what differs, with short values."""
    names = [name for name in one | other if one.get(name) != other.get(name)]
    return [with_values(name, one.get(name), other.get(name)) for name in names]


def _listed(names: list[str]) -> str:
    return listed(names, _NAMED)
