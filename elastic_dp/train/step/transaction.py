"""One optimizer step, as a transaction: everything up to the commit can be undone, everything after
it cannot fail.

    begin    the participants of the step (participants.py)
    leaves   for each of my virtual workers: same buffers, own random numbers, forward, backward
             (gradients are added and sent while the last backward pass runs)
    header   what my participants propose, sent to all
    sums     of my part of the gradient, sent out bucket by bucket
    agree    on the headers of all: go on, stop, or do the step again
    prepare  changed buffers of all, the gradient, its norm and clipping
    commit   one compare-and-swap that excludes an abort
    apply    optimizer, scheduler

A step has its header even where nothing needs a gradient, so nobody completes one that somebody did
not enter: two members differ by one step at most. The mean over the global batch costs no pass over
the gradient: each loss is divided by the weight expected of all (their rows), which only where the
loss function gave others is made good afterwards. Whether the gradient is finite needs no vote: it
has the same bits on all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from elastic_dp.device.global_generators import seed_everything
from elastic_dp.distributed.process_group import ProcessGroup, RecordGather
from elastic_dp.errors import GroupError, SpecError
from elastic_dp.sampling.seeds import body_seed
from elastic_dp.train.state.train_state import StepRecord
from elastic_dp.train.step.loss_result import mean, mean_metrics
from elastic_dp.train.step.participants import (
    RetryStep,
    StepParticipant,
    StopAgreed,
    agree_all,
    propose_all,
)

if TYPE_CHECKING:
    from elastic_dp.train.step_builder import StepBuilder


class Transaction:
    """Runs steps, with all `participants`."""

    def __init__(self, build: StepBuilder, participants: Sequence[StepParticipant]) -> None:
        self.participants, self.gradient, self.leaves = participants, build.gradient, build.leaves
        self.results, self.wishes, self.state = build.results, build.wishes, build.state
        self.reporter, self.control = build.reporter, build.session.control
        self.schedules, self.gang, self.seed = build.schedules, build.gang, build.spec.data.seed
        self._passes = build.reporter.pass_point
        self._group: ProcessGroup | None = None
        self._distributed: tuple[int, ...] = ()  # values of the schedules, as work is distributed
        names = [one.name for one in self.participants]
        for name in names:
            if names.count(name) > 1:
                raise SpecError(f"two participants of a step have the name {name!r}")

    # ----------------------------------------------------------------------- generation

    def open(self, group: ProcessGroup, next_step: int, lineage_id: int) -> None:
        """Begins a generation."""
        self._group, self.leaves.lineage_id = group, lineage_id
        self._header = RecordGather(group)
        for participant in self.participants:
            participant.open(group)
        self._distribute(next_step)
        self.leaves.speed.open()

    def _distribute(self, step: int) -> None:
        self._distributed = tuple(schedule.at(step) for schedule in self.schedules)
        self.gradient.distribute(step)

    def close(self) -> None:
        """Undoes what is not committed and releases the group."""
        self.gradient.close()
        for participant in reversed(self.participants):
            participant.undo()
        self._group = None

    # ----------------------------------------------------------------------------- step

    def attempt(self, step: int) -> StepRecord | StopAgreed | RetryStep:
        """Attempts a step. Raises GroupError if it was not completed; then nothing was applied, and
        what this worker has finished of it is used in the next attempt."""
        aborted = False
        try:
            return self._attempt(step)
        except GroupError:
            aborted = True
            raise
        finally:
            self.leaves.end(aborted=aborted)
            if aborted:
                self.gradient.aborted()

    def _attempt(self, step: int) -> StepRecord | StopAgreed | RetryStep:
        group = self._group
        assert group is not None
        self._begin(step)
        stop = self.wishes.stop is not None
        sends = not self.gradient.late_sums
        self.results.own = self.leaves.run_step(step, sends=sends, idle=stop)
        self.reporter.report("collective")
        self.gradient.sent()
        self._passes("sent", step)
        if group.on_device is not None:
            self._reduce(step)
            self._read_device(group)
        self._header.launch(propose_all(self.participants, self.gang))
        self._passes("header", step)
        if group.on_device is None:
            self._reduce(step)  # while the last bucket and the header are on their way
        records = self._header.collect()
        verdict = agree_all(self.participants, records, self.leaves.shares.joining)
        if verdict is not None:
            self._undo(verdict)
            return verdict
        for participant in self.participants:
            participant.prepare()
        self.gradient.check_finite()
        group.check()
        self.leaves.speed.end_step()
        self._passes("before_commit", step)
        self.control.commit()
        self._passes("after_commit", step)
        return self._apply(step)

    def _begin(self, step: int) -> None:
        self.reporter.report("compute")
        if tuple(schedule.at(step) for schedule in self.schedules) != self._distributed:
            self._distribute(step)
            self.leaves.data.read_ahead(step, self.leaves.shares.mine(step))
        self.leaves.begin(step, self.participants)
        for participant in self.participants:
            participant.begin(step)

    def _reduce(self, step: int) -> None:
        self._passes("exchange", step)
        self.gradient.reduce()
        self._passes("gather", step)

    def _read_device(self, group: ProcessGroup) -> None:
        """Reads all that the host must know of this step, by the only wait for the device."""
        assert group.on_device is not None
        unread = [participant.unread() for participant in self.participants]
        read = iter(group.on_device.read([tensor for some in unread for tensor in some]))
        for participant, some in zip(self.participants, unread, strict=True):
            participant.take([next(read) for _ in some])

    def _undo(self, verdict: StopAgreed | RetryStep) -> None:
        """Undoes a step that the members agreed not to commit."""
        if isinstance(verdict, StopAgreed):
            for participant in self.participants:
                participant.stopped()
        else:
            self.gradient.retry()
        for participant in reversed(self.participants):
            participant.undo()
        if isinstance(verdict, StopAgreed):
            self.control.commit()

    def _apply(self, step: int) -> StepRecord:
        self.reporter.report("apply")
        state, gradient, data = self.state, self.gradient, self.leaves.data
        lr = state.optimizer.param_groups[0].get("lr")  # the scheduler changes it below
        lr = math.nan if lr is None else float(lr)  # Adafactor may choose its own
        seed_everything(body_seed(self.seed, step))
        for participant in reversed(self.participants):
            participant.commit()
        norm = gradient.exchange.norm
        if gradient.applies and gradient.exchange.finite:
            self._passes("optimizer", step)
            for participant in self.participants:
                participant.update()
            state.optimizer.step()
            if state.scheduler is not None:
                state.scheduler.step()
        metrics: dict[str, float] = {}
        for participant in self.participants:
            participant.ended()
            metrics |= participant.metrics()
        results = self.results.of_all.values()
        record = StepRecord(
            number=step,
            epoch=data.epoch_of(step),
            epoch_end=data.ends_epoch(step),
            loss=mean([(one.loss, one.weight) for one in results]),
            weight=gradient.weight,
            metrics=mean_metrics(results) | metrics,
            lr=lr,
            grad_norm=None if norm is None else norm.value,
            kept=self.wishes.checkpoint,
            late=self.wishes.late,
        )
        state.commit(record)
        self._passes("after_step", step)
        return record

    def complete_record(self) -> None:
        """Adds the norm of the last step's gradient to its record, unless the gradient is gone."""
        record, norm = self.state.record, self.gradient.exchange.norm
        if record is not None and record.grad_norm is None and norm is not None:
            record.grad_norm = norm.read()
