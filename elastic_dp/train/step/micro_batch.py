"""One virtual worker's turn: its micro-batch is read, seeded, and run forward and backward."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from elastic_dp.device.accelerator import accelerator_of
from elastic_dp.device.global_generators import seed_everything
from elastic_dp.device.graph_replay import begin_graph_iteration, outside_graphs
from elastic_dp.errors import LossError
from elastic_dp.sampling.seeds import batch_seed, seed_for
from elastic_dp.train.step.loss_result import parse_loss
from elastic_dp.train.step.precision import autocast

if TYPE_CHECKING:
    from elastic_dp.train.step.leaf_runner import Turn
    from elastic_dp.train.step_builder import StepBuilder

LossFn = Callable[[Any, Any], Any]


@dataclass(slots=True)
class MicroBatchResult:
    """The result of one virtual worker's forward pass. `unread` are values that are still on a
    device: metrics by name, and the loss by None."""

    loss: float
    weight: float
    metrics: dict[str, float]
    unread: dict[Any, torch.Tensor] = field(default_factory=dict)

    def measure(self, name: str, value: torch.Tensor) -> None:
        """Adds a metric; a value on a device is read later."""
        if self.unread:
            self.metrics[name], self.unread[name] = math.nan, value
        else:
            self.metrics[name] = float(value)

    def take(self, values: Sequence[float]) -> None:
        """Takes the values of `unread`, in its order."""
        for name, value in zip(self.unread, values, strict=True):
            if name is None:
                self.loss = value
            else:
                self.metrics[name] = value
        self.unread = {}


def take_read(results: Mapping[int, MicroBatchResult], read: Iterable[torch.Tensor]) -> None:
    """Gives the results their `unread` values, in order, once they are on the host."""
    values = iter(read)
    for result in results.values():
        result.take([next(values).reshape(1).tolist()[0] for _ in result.unread])


class Leaf:
    """How a virtual worker makes its gradient in a step: here, by one forward and one backward pass
    of one micro-batch."""

    makes = "gradient"  # for messages
    several = False  # whether a virtual worker has more than one micro-batch in a step

    def __init__(
        self,
        build: StepBuilder,
        *,
        refuses_none: Callable[[int, int], None] = lambda step, virtual_worker: None,
    ) -> None:
        """`refuses_none`: raises the error for a virtual worker without a loss to run backward
        from, where there must be one."""
        given, spec, gang = build.given, build.spec, build.gang
        self._state, self._loss_fn, self._data = build.state, given.loss_fn, build.data
        self._device, self._seed, self._speed = build.device, spec.data.seed, build.speed
        self._report, self._exact = build.reporter.report, spec.exact
        self.rows, self._refuses_none = build.rows, refuses_none
        self._listen_to_warnings = build.session.listen_to_warnings
        self.autocast = autocast(given.precision, build.device)
        self._asynchronous = accelerator_of(build.device).asynchronous
        # The number by which random ones are drawn.
        self._key = gang.micro_batch if gang is not None else int
        self._is_trial = False  # this is the micro-batch before the first step
        self._writes_back = False  # see `check_written`

    def run(self, turn: Turn) -> None:
        """Runs a virtual worker, which may have no rows, and adds its gradient by `LeafRunner.add`.
        Raises GroupError if the group was lost meanwhile."""
        runner, step, v = turn.runner, turn.step, turn.virtual_worker
        points, loss, result = runner.points, None, None
        if self.rows.rows(step, v) > 0:
            if points is not None:
                points("before_forward", step)
            loss, result = self.forward(self.batch(step, v), step, v, turn.expected)
            if points is not None:
                points("forward", step)
            runner.gradients.before_backward()
        if runner.between_leaves is not None:
            runner.between_leaves()
        if loss is None:
            self._refuses_none(step, v)
        else:
            if points is not None:
                points("backward", step)
            loss.backward()
        runner.add(turn, result, contributes=loss is not None)

    def micro_batches(self, step: int) -> int:
        """Returns how many a virtual worker has in a step."""
        return 1

    def first_batch(self, virtual_worker: int) -> int:
        """Returns the number of its first micro-batch in step 1."""
        return virtual_worker

    def try_out(self, virtual_worker: int, batch: Any) -> MicroBatchResult | None:
        """Runs on this micro-batch before the first step, into `p.grad`; None: no gradient."""
        expected = float(self.rows.rows(1, virtual_worker))
        with self.trial():
            loss, result = self.forward(batch, 1, virtual_worker, expected)
        if loss is None:
            self._refuses_none(1, virtual_worker)
            return None
        loss.backward()
        return result

    # ------------------------------------------------------------------------ a micro-batch

    @contextlib.contextmanager
    def trial(self) -> Iterator[None]:
        """A context for the micro-batch before the first step."""
        self._is_trial = True
        try:
            yield
        finally:
            self._is_trial = False

    def batch(self, step: int, v: int) -> Any:
        # A transform draws here, or in a process.
        seed_everything(batch_seed(self._seed, step, self._key(v)))
        self._report(f"data {self._virtual_worker(step, v) if self.several else v}")
        batch = self._data.batch(step, v)
        return batch if self._device.type == "cpu" else to_device(batch, self._device)

    def forward(
        self, batch: Any, step: int, v: int, expected: float | None
    ) -> tuple[torch.Tensor | None, MicroBatchResult]:
        """Returns the scaled loss to run backward from, or None if the weight is 0; and the result.
        `expected`: the weight of the step, by which it is divided; None: it is not scaled."""
        self._report(f"compute {self._virtual_worker(step, v) if self.several else v}")
        seed_everything(seed_for(self._seed, step, self._key(v)))
        if batch is None:  # all its rows lie in bad row groups
            return None, MicroBatchResult(0.0, 0.0, {})
        if self._speed.measures:
            self._speed.start_micro_batch()
        begin_graph_iteration()
        # Where the whole loop is under autocast, weights as they were, or without a gradient, would
        # be used again.
        torch.clear_autocast_cache()
        with self._state.model_guard.loss_runs(), self.autocast():
            returned = self._loss_fn(self._state.model, batch)
        self._listen_to_warnings()  # in the backward pass
        if self.several or self._is_trial:  # else after those of all virtual workers
            self.check_written()
        rows = self._data.rows(step, v) - self._data.masked(step, v)
        # The host would wait for the device at each value, so `Transaction` reads all together.
        unread: dict[str | None, torch.Tensor] = {}
        later = self._asynchronous and not self._is_trial
        loss, weight, metrics = parse_loss(returned, rows, unread if later else None)
        if later:
            unread[None] = outside_graphs(loss.detach())
        value = math.nan if later else float(loss.detach())
        result = MicroBatchResult(value, weight, metrics, unread)
        if weight == 0.0:
            return None, result
        if not later and not math.isfinite(result.loss) and self._state.loss_scale is None:
            return self._without_gradient(step, v, result)
        if not loss.requires_grad:
            raise LossError(
                f"the loss of step {step} on {self._name(step, v)} has no gradient: it was "
                "detached, made under no_grad, or depends on no parameter that requires one. "
                "Return it with the weight 0 to leave the micro-batch out"
            )
        scale = 1.0 if expected is None else weight / expected
        if self._state.loss_scale is not None:
            scale *= self._state.loss_scale.scale
        return loss * scale, result

    def check_written(self) -> None:
        """Raises LossError if a loss function has changed a parameter. If it wrote to the parameter
        in the trial, too, where all values are compared, it only writes the values back."""
        name = self._state.model_guard.written_by_losses()
        if name is None:
            return
        self._writes_back |= self._is_trial
        if self._exact and not self._writes_back:
            raise LossError(
                f"the loss function changed model.{name}. It may run more than once for a step, "
                "and each worker runs it for its own micro-batches: change parameters by the "
                "optimizer; several may be one, that holds the others"
            )

    def _virtual_worker(self, step: int, v: int) -> int:
        return v

    def _name(self, step: int, v: int) -> str:
        """Returns a name of the micro-batch for messages."""
        return f"virtual worker {v}"

    def _without_gradient(
        self, step: int, v: int, result: MicroBatchResult
    ) -> tuple[None, MicroBatchResult]:
        """The loss is not finite. The header tells all members; they raise together."""
        return None, result


def not_finite_loss(loss: float, step: int, where: str, rows: str) -> LossError:
    return LossError(
        f"the loss of step {step} is {loss} on {where} ({rows}). Give such a micro-batch the "
        "weight 0 to leave it out"
    )


def to_device(batch: Any, device: torch.device) -> Any:
    """Moves tensors in dicts, lists and tuples, and other objects with `.to` (a BatchEncoding)."""
    if device.type == "cpu":
        return batch
    if isinstance(batch, Mapping) and type(batch) is dict:
        return {key: to_device(value, device) for key, value in batch.items()}
    if type(batch) in (list, tuple):
        return type(batch)(to_device(value, device) for value in batch)
    return batch.to(device, non_blocking=True) if hasattr(batch, "to") else batch
