"""One optimizer step, as a transaction: everything up to the commit can be undone, everything after
it cannot fail.

    for each of my virtual workers: same buffers, own random numbers, forward, backward
        (gradients are added and sent while the last backward runs)
    launch   my header: losses, weights, metrics, wishes to stop, which parameters were used, which
             buffers changed
    sums     of my part of the gradient, sent out bucket by bucket
    header   of all, collected: whether all go on, stop, or do the step again
    gather   changed buffers of all; finished parts of all
    update   of copies of this member's pieces; parameters of all, gathered; where it is sharded
    commit   one compare-and-swap that excludes an abort
    apply    gradients assigned, clipped, optimizer, scheduler, buffers

A step has its header even where nothing needs a gradient, so nobody completes one that somebody did
not enter: two members differ by one step at most. The mean over the global batch costs no pass over
the gradient: each loss is divided by the weight expected of all (their rows), which only where the
loss function gave others is made good afterwards. Whether the gradient is finite needs no vote: it
has the same bits on all. With `staleness=1` it is that of the step before (delayed_gradient.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from elastic_dp.coordinator.messages import Membership, whole_blocks
from elastic_dp.data.pipeline.global_generators import seed_everything
from elastic_dp.distributed.gradient_order import GradientOrder
from elastic_dp.distributed.gradient_reducer import GradientReducer
from elastic_dp.distributed.process_group import ProcessGroup
from elastic_dp.distributed.record_gather import RecordGather
from elastic_dp.distributed.reduction_tree import Node, Share
from elastic_dp.errors import GroupError
from elastic_dp.sampling import StepSchedule
from elastic_dp.sampling.seeds import body_seed, rounding_seed
from elastic_dp.train.gang.gang import Gang
from elastic_dp.train.generations.worker_control import WorkerControl
from elastic_dp.train.noise_scale import LEAF_SQUARE, estimated
from elastic_dp.train.sharding.sharded_optimizer import ShardedOptimizer
from elastic_dp.train.sharding.sharded_step import prepare_step
from elastic_dp.train.state.module_buffers import ModuleBuffers
from elastic_dp.train.state.step_record import StepRecord
from elastic_dp.train.state.train_state import TrainState
from elastic_dp.train.state.weight_comparison import WeightComparison
from elastic_dp.train.step.batch_source import RowSource
from elastic_dp.train.step.committed_gradients import CommittedGradients
from elastic_dp.train.step.compute_speed import ComputeSpeed
from elastic_dp.train.step.delayed_gradient import DelayedGradient
from elastic_dp.train.step.finished_work import FinishedNode, FinishedWork, StepInputs, finished_of
from elastic_dp.train.step.inner_steps import InnerSteps
from elastic_dp.train.step.leaf_runner import LeafRunner
from elastic_dp.train.step.loss_result import mean, mean_metrics, not_finite, total_weight
from elastic_dp.train.step.micro_batch import MicroBatchResult, MicroBatchRunner, take_read
from elastic_dp.train.step.participants import (
    BadRowGroups,
    Buffers,
    CheckpointWish,
    DeviceConnections,
    GradientFlags,
    GradientOrders,
    ParameterGroups,
    Results,
    RetryStep,
    StepParticipant,
    StopAgreed,
    StopWish,
    WeightDigests,
    agree_all,
    propose_all,
)


@dataclass
class StepRunner:
    """Runs steps for one session. Group and membership are set in each generation.

    `schedule`: the number of virtual workers of each step. `staleness`, `inner_steps`: of each
    step. `equal_shares`: members are meant to run equally many.
    """

    state: TrainState
    weights: WeightComparison
    micro_batches: MicroBatchRunner
    data: RowSource
    schedule: StepSchedule
    staleness: StepSchedule
    inner_steps: StepSchedule
    equal_shares: bool
    exact: bool
    clip_norm: float | None
    seed: int
    control: WorkerControl
    report: Callable[[str], None]  # tells the phase
    pass_point: Callable[[str, int], None]  # see fault_injection.py
    speed: ComputeSpeed
    noise_scale_every: int | None = None
    wire: str | None = None
    gang: Gang | None = None  # the processes of this worker, if there are several
    inner: InnerSteps | None = None  # of each virtual worker, if it makes several
    clip_value: float | None = None
    _checkpoint_planned: Callable[[int], bool] | None = None  # None: there is no storage
    _group: ProcessGroup | None = None
    _membership: Membership | None = None
    _numbers: tuple[int, int, int] = (0, 0, 0)  # of the present step; see `_numbers_of`
    _virtual_workers: int = 0  # in it, and the shares of all ranks
    _shares: Sequence[Share] = ()
    delayed: DelayedGradient | None = None  # which it applies; None: its own
    _lineage_id: int = 0  # of the state; see `Membership.lineage_id`
    # What is finished of a step that was aborted; see finished_work.py.
    _finished: FinishedWork | None = None

    def __post_init__(self) -> None:
        parameters, previous = self.state.parameters, self.state.previous
        order = None if self.gang is None else GradientOrder()
        self.gradients = GradientReducer(parameters, self.wire, order)
        self.buffers = ModuleBuffers(self.state.model)
        self.committed = CommittedGradients(
            self.state, self.clip_norm, self.gang, clip_value=self.clip_value
        )
        self._leaves = LeafRunner(
            self.data,
            self.micro_batches,
            self.gradients,
            self.buffers,
            self.control,
            self.speed,
            self.pass_point,
            self.gang,
            self.noise_scale_every,
            self.inner,
            None if self.state.sharding is None else self.state.sharding.send_copies,
        )
        self._results = Results(self.micro_batches, self.data, self.gang)
        self._stop, self._checkpoint = StopWish(self.control), CheckpointWish(self.control)
        self._groups = ParameterGroups(self.state.optimizers.all)
        self._flags = GradientFlags(self.gradients, lambda: self.sums)
        self._participants: list[StepParticipant] = [
            WeightDigests(self.weights),
            DeviceConnections(),
            *([] if order is None or self.gang is None else [GradientOrders(self.gang, order)]),
            self._stop,
            self._checkpoint,
            self._flags,
            self._groups,
            BadRowGroups(self.state, self.data, self._results),
            self._results,
            Buffers(self.buffers, lambda: self._virtual_workers, self.pass_point, self.gang),
        ]
        self._delay: DelayedGradient | None = None  # of the steps that have one
        if previous is not None:
            given = self._leaves, self.staleness, self.seed, self._expected_weight
            sums = GradientReducer(parameters, self.wire, computes=False)
            self._delay = DelayedGradient(previous, sums, *given)
        self.delayed = self._delayed_in(1)

    def expect_checkpoints(self, planned: Callable[[int], bool]) -> None:
        """Sets which steps have a checkpoint, as far as all members know before them."""
        self._checkpoint_planned = planned

    def _has_checkpoint(self, step: int, *, agreed: bool) -> bool:
        """Whether `step` has a checkpoint, as far as all members know, or has one as `agreed`."""
        planned = self._checkpoint_planned
        return planned is not None and (agreed or planned(step))

    def open(
        self,
        group: ProcessGroup,
        membership: Membership,
        next_step: int,
        lineage_id: int,
        *,
        joined_after: int,
    ) -> None:
        """Begins a generation. `joined_after` is the step with whose state this worker began."""
        workers = [member.worker for member in membership.members]
        self._groups.open_among(workers, joined_after)
        self._group, self._membership, self._lineage_id = group, membership, lineage_id
        self._header = RecordGather(group)
        for participant in self._participants:
            participant.open(group)
        self._distribute(next_step)
        self.speed.open()

    def share(self, membership: Membership, rank: int, step: int) -> list[int]:
        """Returns the virtual workers that a rank of this membership runs in `step`."""
        shares = membership.shares(self.schedule.at(step), equal=self.equal_shares)
        return [v for first, last in shares[rank] for v in range(first, last)]

    @property
    def sums(self) -> GradientReducer:
        """What adds up the gradient that a step applies."""
        return self.gradients if self.delayed is None else self.delayed.sums

    def _delayed_in(self, step: int) -> DelayedGradient | None:
        return self._delay if self._delay is not None and self._delay.delays(step) else None

    def _numbers_of(self, step: int) -> tuple[int, int, int]:
        """Returns the numbers of virtual workers and of inner steps, and the staleness."""
        return self.schedule.at(step), self.inner_steps.at(step), self.staleness.at(step)

    def _distribute(self, step: int) -> None:
        """Distributes the virtual workers of `step`. The gradients of the step before it go."""
        self._virtual_workers, *_ = self._numbers = self._numbers_of(step)
        self.delayed = self._delayed_in(step)
        if self._delay is not None and self.delayed is None:
            self._delay.sums.close(keeps_memory=False)
        self._shares = self._open_reducer(self.gradients, self._virtual_workers)
        if self.delayed is not None:
            self._distribute_delayed(step)

    def _distribute_delayed(self, step: int) -> None:
        """Distributes the virtual workers of the step before `step` whose gradient it applies."""
        assert self._group is not None and self.delayed is not None
        total = self.schedule.at(max(1, step - 1))
        shares = self._open_reducer(self.sums, total)
        self.delayed.distribute(shares[self._group.rank], total)

    def _open_reducer(self, reducer: GradientReducer, virtual_workers: int) -> Sequence[Share]:
        group, membership = self._group, self._membership
        assert group is not None and membership is not None
        shares = membership.shares(virtual_workers, equal=self.equal_shares)
        sharding, topology = self.state.sharding, membership.topology
        needed = None if sharding is None else sharding.needed()
        sends = reducer is self.sums
        reducer.close(keeps_memory=sends)
        reducer.open(group, shares, virtual_workers, self.exact, topology, needed, sends)
        return shares

    def close(self) -> None:
        """Undoes what is not committed and releases the group."""
        self.committed.drop()  # the next generation may use their memory
        for reducer in (self.gradients, self.sums):
            reducer.drop()
            reducer.close()
        for participant in self._participants:
            participant.undo()
        self._group = None

    def finished_nodes(self, step: int) -> tuple[Node, ...]:
        """Returns the subtrees of virtual workers that this worker has finished of an aborted
        attempt at `step`, or holds of the step before, as ranges of those that a membership
        distributes."""
        finished, delay = self._finished, self._delay
        if delay is not None and delay.held:
            return whole_blocks(delay.held, self.schedule.least, self.schedule.at(step - 1))
        if finished is None or finished.inputs is None or finished.inputs.step != step:
            return ()
        return whole_blocks(finished.nodes, self.schedule.least, self.schedule.at(step))

    def forget_finished(self) -> None:
        """Forgets what is finished of an aborted step: the state is about to change."""
        self._finished = None
        if self._delay is not None:
            self._delay.forget()

    def attempt(self, step: int) -> StepRecord | StopAgreed | RetryStep:
        """Attempts a step. Raises GroupError if it was not completed; then nothing was applied, and
        what this worker has finished of it is used in the next attempt."""
        outcome: StepRecord | StopAgreed | RetryStep | None = None
        try:
            outcome = self._attempt(step)
        except GroupError:
            self._keep_finished()
            if self.delayed is not None:
                self.delayed.hold_again()
            raise
        finally:
            self._leaves.end()
            if outcome is not None:
                self._finished = None
        return outcome

    def _attempt(self, step: int) -> StepRecord | StopAgreed | RetryStep:
        group, membership = self._group, self._membership
        assert group is not None and membership is not None
        self.report("compute")
        self.committed.drop()
        if self._numbers_of(step) != self._numbers:
            self._distribute(step)
            self.data.read_ahead(step, self.share(membership, group.rank, step))
        expected = self._expected_weight(step)
        for participant in self._participants:
            participant.begin(step)
        stop = self._stop.reason
        if self.delayed is not None:
            if self.schedule.at(max(1, step - 1)) != self.delayed.virtual_workers:
                self._distribute_delayed(step)
            self.delayed.launch(group)
        noise = self._leaves.measures_noise(step)
        self.gradients.begin(rounding_seed(self.seed, step), measures=noise)
        self.speed.begin(self.inner_steps.at(step))
        self._begin_finished(step, stop, expected)
        if self.state.sharding is not None:
            self.state.sharding.begin()
        given = step, self._shares[group.rank], self._virtual_workers, expected, self._finished
        meanwhile = None if self.delayed is None else self.sums.advance
        self._results.take(self._leaves.run(*given, meanwhile=meanwhile, stop=stop is not None))
        self.report("collective")
        if self.delayed is None:
            self.gradients.send()
        else:  # before the header goes out: all members launch collectives in the same order
            self.sums.reduce()
        self.pass_point("sent", step)
        extremes: list[torch.Tensor] | None = None
        if group.on_device is None:
            self._launch_header(step)
            self.pass_point("exchange", step)
            self.sums.reduce()  # while the last bucket and the header are on their way
            self.pass_point("gather", step)
        else:
            extremes = self._read_device(step, self._results.own)
            self._launch_header(step)
        verdict = agree_all(self._participants, self._header.collect())
        if verdict is not None:
            self._undo(verdict)
            return verdict
        for participant in self._participants:
            participant.prepare()
        results = self._results.of_all
        weight, loss_scale = total_weight(step, results.values()), self.state.loss_scale
        expected *= 1 if self.gang is None else self.gang.size  # `fully_shard`'s mean
        own = (expected / weight if weight else 1.0) / (loss_scale.scale if loss_scale else 1.0)
        factor = own if self.delayed is None else self.delayed.previous.factor
        norm: float | None = None
        if self._sharding is not None:
            norm = prepare_step(
                self._sharding,
                self.gradients,
                self.weights,
                step,
                factor,
                self._flags.used,
                self.clip_norm,
                self.pass_point,
                extremes,
                keeps=self._has_checkpoint(step, agreed=self._checkpoint.agreed),
            )
            finite = norm is not None
        elif extremes is None:
            finite = self.sums.complete(factor)
        else:
            finite = self.sums.finish(factor, extremes)
        if not finite and loss_scale is None:
            at = step if self.delayed is None else step - 1
            raise not_finite(at, results, self.data.describe)
        group.check()
        self.speed.end_step()
        self.pass_point("before_commit", step)
        self.control.commit()
        self.pass_point("after_commit", step)
        applies = self.delayed is None or self.delayed.commit(step, own, results)
        for participant in self._participants:
            participant.commit()
        return self._apply(step, results, weight, norm, finite if applies else None)

    # ------------------------------------------------------------------- up to the commit

    def _expected_weight(self, step: int) -> float:
        return float(sum(self.data.rows(step, v) for v in range(self.schedule.at(step))))

    def _begin_finished(self, step: int, stop: str | None, expected: float) -> None:
        """Forgets what was finished of another step, or from other inputs."""
        inputs = StepInputs(
            step,
            self._lineage_id,
            self.exact,
            expected,
            self.state.loss_scale.scale if self.state.loss_scale else None,
            frozenset(self.state.bad_row_groups),
            self.gradients.parameters,
        )
        # With a stop requested, no leaf runs: there would be nothing to send with what is kept.
        self._finished = None if stop is not None else finished_of(inputs, self._finished)

    def _keep_finished(self) -> None:
        """Keeps what is finished of the step that was aborted."""
        if self._finished is None or self._finished.inputs is None or self.gang is not None:
            return  # a gang's processes have not finished the same
        step = self._finished.inputs.step
        for node, gradients in self.gradients.finished().items():
            results = {v: r for v, r in self._leaves.results.items() if node[0] <= v < node[1]}
            if not any(self.data.bad_row_groups(step, v) for v in results):
                buffers = self.buffers.finished(range(*node))
                self._finished.add(node, FinishedNode(gradients, results, buffers))

    def _read_device(
        self, step: int, results: Mapping[int, MicroBatchResult]
    ) -> list[torch.Tensor]:
        """Adds up and exchanges the gradients, and reads all that the host must know of this step.

        This is the only time in a step that the host waits for the device. Returns what
        `GradientReducer.finish` needs.
        """
        assert self._group is not None and self._group.on_device is not None
        self.pass_point("exchange", step)
        self.sums.reduce()
        self.pass_point("gather", step)
        extremes = self.sums.arrive()
        buffers = self.buffers.unread()
        values = [value for result in results.values() for value in result.unread.values()]
        read = self._group.on_device.read([*extremes, *buffers, *values])
        take_read(results, read[len(extremes) + len(buffers) :])
        self.buffers.take(read[len(extremes) : len(extremes) + len(buffers)])
        return read[: len(extremes)]

    def _launch_header(self, step: int) -> None:
        self._header.launch(propose_all(self._participants, self.gang))
        self.pass_point("header", step)

    @property
    def _sharding(self) -> ShardedOptimizer | None:
        """Has this worker's part of the gradient and the state; None: it has all of them."""
        sharding = self.state.sharding
        return None if sharding is None or sharding.all_hold_all else sharding

    def _undo(self, verdict: StopAgreed | RetryStep) -> None:
        """Undoes a step that the members agreed not to commit."""
        if isinstance(verdict, StopAgreed):
            if self.state.sharding is not None:
                self.state.sharding.copy_rest()
        else:
            self.sums.settle()
            self.gradients.add_sequentially()
            if self.delayed is not None:
                self.delayed.hold_again()
        self.gradients.drop()
        for participant in self._participants:
            participant.undo()
        if isinstance(verdict, StopAgreed):
            self.control.commit()

    # ---------------------------------------------------------------------- from the commit

    def _apply(
        self,
        step: int,
        results: Mapping[int, MicroBatchResult],
        weight: float,
        norm: float | None,  # None: not known yet
        finite: bool | None,  # None: there is no gradient to apply
    ) -> StepRecord:
        self.report("apply")
        state = self.state
        lr = float(state.optimizer.param_groups[0]["lr"])  # the scheduler changes it below
        seed_everything(body_seed(self.seed, step))
        grad_norm = norm
        if norm is None:
            self.sums.assign(self._flags.used)
            self.committed.take()
        noise: dict[str, float] = {}
        if self._leaves.measures_noise(step):
            scale = state.loss_scale.scale if state.loss_scale else 1.0
            scaled = self._expected_weight(step) / scale
            leaves = [result.take_leaf_square(LEAF_SQUARE, scaled) for result in results.values()]
            if finite:
                noise = estimated(leaves, self.committed.square())
        if finite:
            if norm is None:
                on_device = self._group is not None and self._group.on_device is not None
                grad_norm = self.committed.clip(reads_later=on_device)
            self.pass_point("optimizer", step)
            self._update_parameters()
            if state.scheduler is not None:
                state.scheduler.step()
        if state.loss_scale is not None and finite is not None:
            state.loss_scale.step_ended(overflow=not finite)
        # A member that takes the step over has no gradients for its body, so no member's body has.
        if self.delayed is not None:
            self.delayed.hold()
        self.gradients.drop()
        record = StepRecord(
            number=step,
            epoch=self.data.epoch_of(step),
            epoch_end=self.data.ends_epoch(step),
            loss=mean([(one.loss, one.weight) for one in results.values()]),
            weight=weight,
            metrics=mean_metrics(results.values()) | noise,
            lr=lr,
            grad_norm=grad_norm,
            kept=self._checkpoint.agreed,
            late=self._checkpoint.late,
        )
        state.commit(record)
        self.pass_point("after_step", step)
        return record

    def _update_parameters(self) -> None:
        sharding = self.state.sharding
        if sharding is not None:
            sharding.step_ends([p.grad for p in self.state.parameters.values()])
            self.gradients.drop()  # what is called below updates nothing; schedulers look for it
        self.state.optimizer.step()

    def complete_record(self) -> None:
        """Adds the norm of the last step's gradients to its record, unless they are gone."""
        if self.state.record is not None:
            self.committed.complete(self.state.record)
