"""The inner steps of a virtual worker (`inner_steps=H`, DiLoCo): a leaf of the reduction tree that
is not a gradient, but what H steps of an optimizer of its own change.

    start    θ(t) is copied, and the inner optimizer is made
    H times  forward and backward of the next micro-batch, clipping, a step of that optimizer
    leaf     the pseudo-gradient θ(t) - θ, by the weight of these micro-batches
    end      the parameters are θ(t) again, whatever happened

So a leaf depends on θ(t), its rows and its seeds alone, as any leaf does. The tree adds the leaves,
and the optimizer of the job applies their mean to θ(t). Nothing of the inner steps outlives them:
the inner optimizer begins anew each time, since state that it kept would be lost with its worker.
State that is to go on is written to parameters that need no gradient of the loss, or to buffers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import nn

from elastic_dp.device.global_generators import seed_everything
from elastic_dp.errors import GroupError, ModelError, SpecError
from elastic_dp.extensions.diloco.inner_moments import InnerMoments
from elastic_dp.sampling.seeds import inner_seed
from elastic_dp.sampling.step_schedule import StepSchedule
from elastic_dp.train.step.batch_source import RowSource
from elastic_dp.train.step.leaf_runner import Turn
from elastic_dp.train.step.loss_result import mean, mean_metrics
from elastic_dp.train.step.micro_batch import Leaf, MicroBatchResult, not_finite_loss
from elastic_dp.train.step_builder import StepBuilder
from elastic_dp.train.steps_arguments import check_clipping, check_function, check_optimizer

PseudoGradients = dict[torch.Tensor, torch.Tensor]  # by parameter


def extend(build: StepBuilder) -> None:
    """Raises SpecError and ModelError."""
    _check(build)
    inner_steps = StepSchedule(build.spec.inner_steps_by_step)
    build.rows = InnerRows(build.data, inner_steps)
    build.schedules.append(inner_steps)
    build.new_leaf = InnerSteps


def _check(build: StepBuilder) -> None:
    given = build.given
    if given.inner_optimizer is None:
        raise SpecError(
            f"inner_steps is {build.spec.inner_steps}, and ctx.steps got no inner_optimizer: pass "
            "inner_optimizer=lambda model, step: torch.optim.AdamW(model.parameters(), lr=…). The "
            "optimizer of ctx.steps is the outer one, such as "
            "SGD(lr=0.7, momentum=0.9, nesterov=True)"
        )
    check_clipping("inner_clip_norm", given.inner_clip_norm)
    if given.precision == "fp16":
        raise SpecError(
            'precision="fp16" scales the loss of a step, which does not work with inner_steps; '
            'use "bf16"'
        )
    check_function("inner_optimizer", given.inner_optimizer, 2, "(model, step)")
    _check_optimizers(given)


def _check_optimizers(given: Any) -> None:
    made, again = (given.inner_optimizer(given.model, 1) for _ in range(2))
    if not isinstance(made, torch.optim.Optimizer):
        raise ModelError(
            f"inner_optimizer returned a {type(made).__name__}, must return a torch.optim.Optimizer"
        )
    if made is again:
        raise ModelError(
            "inner_optimizer returned the same optimizer twice, must make a new one in each call: "
            "state that it keeps would be lost with a worker"
        )
    check_optimizer("inner optimizer", made, given.model)
    outer = {p for group in given.optimizer.param_groups for p in group["params"]}
    inner = {p for group in made.param_groups for p in group["params"]}
    for name, p in given.model.named_parameters():
        if p in inner and p not in outer:
            raise ModelError(
                f"the inner optimizer trains model.{name}, which the optimizer of ctx.steps does "
                "not have: what the inner steps learn would be lost. Give it to both"
            )


class InnerRows:
    """Implements `RowSource`: a virtual worker has the rows of all its inner steps.

    The data set, `each`, is opened for H times as many virtual workers as the job has, if a step
    has H inner steps: inner step h of virtual worker v has micro-batch v * H + h. So the order of
    rows, the end of an epoch and reading ahead are those of any run, and where H changes with the
    step, those of a batch that does.
    """

    def __init__(self, each: RowSource, inner_steps: StepSchedule) -> None:
        self._each, self._inner_steps = each, inner_steps
        self.epoch_of, self.ends_epoch = each.epoch_of, each.ends_epoch
        self.check_bad, self.mark_bad = each.check_bad, each.mark_bad

    def keys(self, step: int, virtual_worker: int) -> range:
        """Returns the numbers of its micro-batches, in the order of its inner steps."""
        count = self._inner_steps.at(step)
        return range(virtual_worker * count, (virtual_worker + 1) * count)

    def keys_with_rows(self, step: int, virtual_worker: int) -> list[int]:
        """Returns those that are not empty, as some are in a short last step of an epoch."""
        return [k for k in self.keys(step, virtual_worker) if self._each.rows(step, k)]

    def virtual_worker(self, step: int, key: int) -> int:
        return key // self._inner_steps.at(step)

    def name(self, step: int, key: int) -> str:
        """Returns a name for messages."""
        v, number = divmod(key, self._inner_steps.at(step))
        return f"virtual worker {v}, inner step {number + 1}"

    def rows(self, step: int, virtual_worker: int) -> int:
        return sum(self._each.rows(step, key) for key in self.keys(step, virtual_worker))

    def describe(self, step: int, virtual_worker: int) -> str:
        first, *more = self.keys_with_rows(step, virtual_worker)
        described = self._each.describe(step, first)
        return f"{described}, and {len(more)} more micro-batches" if more else described

    def read_ahead(self, step: int, virtual_workers: Sequence[int]) -> None:
        self._each.read_ahead(step, [key for v in virtual_workers for key in self.keys(step, v)])

    def bad_row_groups(self, step: int, virtual_worker: int) -> frozenset[int]:
        each = (self._each.bad_row_groups(step, key) for key in self.keys(step, virtual_worker))
        return frozenset[int]().union(*each)


@dataclass(slots=True)
class InnerStepsResult(MicroBatchResult):
    """The result of the inner steps of one virtual worker, together. `unread` has that of each."""

    parts: Sequence[MicroBatchResult] = field(default=())

    @classmethod
    def of(cls, parts: Sequence[MicroBatchResult]) -> InnerStepsResult:
        unread = {(i, name): t for i, one in enumerate(parts) for name, t in one.unread.items()}
        found = cls(math.nan, math.fsum(one.weight for one in parts), {}, unread, parts)
        if not unread:
            found.take(())
        return found

    def take(self, values: Sequence[float]) -> None:
        following = iter(values)
        for one in self.parts:
            one.take([next(following) for _ in one.unread])
        self.loss = mean([(one.loss, one.weight) for one in self.parts])
        self.metrics = mean_metrics(self.parts)
        self.unread = {}


class InnerSteps(Leaf):
    """Makes the inner steps of one model."""

    makes = "pseudo-gradient"
    several = True
    rows: InnerRows

    def __init__(self, build: StepBuilder) -> None:
        super().__init__(build)
        given = build.given
        assert given.inner_optimizer is not None
        self.model, self.outer = given.model, given.optimizer
        self.make_optimizer, self.clip_norm = given.inner_optimizer, given.inner_clip_norm
        self.gradients = build.gradients

    def run(self, turn: Turn) -> None:
        """Runs a leaf to its end, also where the group is lost: the next generation needs it."""
        lost: list[GroupError] = []

        def passes(point: str) -> None:
            if point == "backward" and runner.between_leaves is not None and not lost:
                try:
                    runner.between_leaves()
                except GroupError as error:
                    lost.append(error)
            if runner.points is not None:
                runner.points(point, step)

        runner, step, v = turn.runner, turn.step, turn.virtual_worker
        found: PseudoGradients = {}
        result: MicroBatchResult | None = None
        if self.rows.rows(step, v) > 0:
            keys = self.rows.keys_with_rows(step, v)
            batches = ((key, self.batch(step, key)) for key in keys)
            found, result = self._make(step, v, batches, turn.expected, passes)
        contributes = result is not None and result.weight > 0
        runner.add(turn, result, contributes=contributes, given=found)
        if lost:
            raise lost.pop()

    def micro_batches(self, step: int) -> int:
        return len(self.rows.keys(step, 0))

    def first_batch(self, virtual_worker: int) -> int:
        return self.rows.keys_with_rows(1, virtual_worker)[0]

    def try_out(self, virtual_worker: int, batch: Any) -> MicroBatchResult | None:
        expected = float(self.rows.rows(1, virtual_worker))
        batches = [(self.first_batch(virtual_worker), batch)]
        with self.trial():
            found, result = self._make(1, virtual_worker, batches, expected, lambda point: None)
        for p, gradient in found.items():
            p.grad = gradient
        return result if result.weight else None

    def _make(
        self,
        step: int,
        v: int,
        batches: Iterable[tuple[int, Any]],
        expected: float,
        passes: Callable[[str], None],
    ) -> tuple[PseudoGradients, MicroBatchResult]:
        """Makes an inner step with each of `batches`.

        Returns the pseudo-gradients of the parameters that had a gradient in any of them or were
        written to, and the result of them together. `expected`: the weight of the step. `passes`:
        is told the points of each inner step. Raises LossError, ModelError, and what `passes`
        raises.
        """
        start = {p: p.detach().clone() for p in self.model.parameters() if p.requires_grad}
        versions = {p: p._version for p in start}
        try:
            used, results = self._train(step, v, batches, passes)
            used |= {p for p, version in versions.items() if p._version != version}
            result = InnerStepsResult.of(results)
            scale = result.weight / expected
            return {p: (start[p] - p.detach()).mul_(scale) for p in start if p in used}, result
        finally:
            with torch.no_grad():
                for p, value in start.items():
                    p.copy_(value)
            self._drop_gradients()

    # ----------------------------------------------------------------------------------- private

    def _train(
        self,
        step: int,
        v: int,
        batches: Iterable[tuple[int, Any]],
        passes: Callable[[str], None],
    ) -> tuple[set[torch.Tensor], list[MicroBatchResult]]:
        """Returns the parameters that had a gradient, and the results with a weight."""
        seed_everything(inner_seed(self._seed, step, v))
        optimizer = self.make_optimizer(self.model, step)
        for module in self.model.modules():
            if isinstance(module, InnerMoments):
                module.refuse_other_mean(self.outer)
        used: set[torch.Tensor] = set()
        results = []
        try:
            for key, batch in batches:
                passes("before_forward")
                loss, result = self.forward(batch, step, key, None)
                passes("forward")
                self.gradients.check_after_loss()
                if loss is not None:
                    passes("backward")
                    loss.backward()
                    self.gradients.check_after_backward()
                    used |= self._update(optimizer)
                    results.append(result)
                self._speed.end_micro_batch()
        finally:
            optimizer.state.clear()  # now: a scheduler and its optimizer keep each other
        return used, results

    def _update(self, optimizer: torch.optim.Optimizer) -> set[torch.Tensor]:
        """Makes a step with the gradients that are there. Returns the parameters that have one."""
        parameters = list(self.model.parameters())
        used: set[torch.Tensor] = {p for p in parameters if p.grad is not None}
        if self.clip_norm is not None:
            nn.utils.clip_grad_norm_(parameters, self.clip_norm)
        optimizer.step()
        self._drop_gradients()
        return used

    def _virtual_worker(self, step: int, v: int) -> int:
        return self.rows.virtual_worker(step, v)

    def _name(self, step: int, v: int) -> str:
        return self.rows.name(step, v)

    def _without_gradient(self, step: int, v: int, result: MicroBatchResult) -> NoReturn:
        where, described = self.rows.name(step, v), self._data.describe(step, v)
        raise not_finite_loss(result.loss, step, where, described)

    def _drop_gradients(self) -> None:
        for p in self.model.parameters():
            p.grad = None
