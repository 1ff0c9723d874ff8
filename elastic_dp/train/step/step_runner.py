"""One optimizer step, as a transaction: everything up to the commit can be undone, everything after
it cannot fail.

    for each of my virtual workers: same buffers, own random numbers, forward, backward
        (gradients are added and sent while the last backward runs)
    launch   my header: losses, weights, metrics, wishes to stop, which parameters were used, which
             buffers changed
    sums     of my part of the gradient, sent out bucket by bucket
    header   of all, collected: whether all go on, stop, or do the step again
    gather   changed buffers of all; finished parts of all
    update   of this member's pieces, out of place, and of all, gathered; where they are sharded
    commit   one compare-and-swap that excludes an abort
    apply    gradients assigned, clipped, optimizer, scheduler, buffers

A step has its header even where nothing needs a gradient, so nobody completes one that somebody did
not enter: two members differ by one step at most. The mean over the global batch costs no pass over
the gradient: each loss is divided by the weight expected of all (their rows), which only where the
loss function gave others is made good afterwards. Whether the gradient is finite needs no vote: it
has the same bits on all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from elastic_dp.coordinator.messages import Membership, whole_blocks
from elastic_dp.data.pipeline.global_generators import seed_everything
from elastic_dp.distributed.gradient_order import GradientOrder
from elastic_dp.distributed.gradient_reducer import GradientReducer
from elastic_dp.distributed.process_group import ProcessGroup
from elastic_dp.distributed.record_gather import RecordGather
from elastic_dp.distributed.reduction_tree import Leaf, Node, Share, fold
from elastic_dp.errors import GroupError, LossError
from elastic_dp.sampling import BatchSchedule
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
from elastic_dp.train.step.batch_source import BatchSource
from elastic_dp.train.step.committed_gradients import CommittedGradients
from elastic_dp.train.step.compute_speed import ComputeSpeed
from elastic_dp.train.step.finished_work import FinishedNode, FinishedWork, StepInputs, finished_of
from elastic_dp.train.step.gang_step import record_of_gang, refuse_change, refuse_none
from elastic_dp.train.step.loss_result import mean, mean_metrics, total_weight
from elastic_dp.train.step.micro_batch import MicroBatchResult, MicroBatchRunner
from elastic_dp.train.step.step_header import MemberHeader, RetryStep, StepHeader, StopAgreed


@dataclass
class StepRunner:
    """Runs steps for one session. Group and membership are set in each generation.

    `schedule`: the number of virtual workers of each step. `equal_shares`: members are meant to run
    equally many.
    """

    state: TrainState
    weights: WeightComparison
    micro_batches: MicroBatchRunner
    data: BatchSource
    schedule: BatchSchedule
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
    # Whether a checkpoint of this step is due, as far as all members know before it.
    checkpoint_planned: Callable[[int], bool] | None = None  # None: there is no storage
    _group: ProcessGroup | None = None
    _membership: Membership | None = None
    _virtual_workers: int = 0  # of the present step, and the shares of all ranks in it
    _shares: Sequence[Share] = ()
    _lineage_id: int = 0  # of the state; see `Membership.lineage_id`
    # What is finished of a step that was aborted; see finished_work.py.
    _finished: FinishedWork | None = None
    _results: dict[int, MicroBatchResult] = field(default_factory=dict)

    def __post_init__(self) -> None:
        order = None if self.gang is None else GradientOrder()
        self.gradients = GradientReducer(self.state.parameters, self.wire, order)
        self.buffers = ModuleBuffers(self.state.model)
        self.committed = CommittedGradients(self.state, self.clip_norm, self.gang)

    def expect_checkpoints(self, planned: Callable[[int], bool]) -> None:
        """Sets which steps have a checkpoint, as far as all members know before them."""
        self.checkpoint_planned = planned

    def open(
        self, group: ProcessGroup, membership: Membership, next_step: int, lineage_id: int
    ) -> None:
        self._group, self._membership = group, membership
        self._lineage_id = lineage_id
        self._header, self._values = RecordGather(group), RecordGather(group)
        self._distribute(next_step)
        self.speed.open()

    def share(self, membership: Membership, rank: int, step: int) -> list[int]:
        """Returns the virtual workers that a rank of this membership runs in `step`."""
        shares = membership.shares(self.schedule.at(step), equal=self.equal_shares)
        return [v for first, last in shares[rank] for v in range(first, last)]

    def _distribute(self, step: int) -> None:
        """Distributes the virtual workers of `step`. The gradients of the step before it go."""
        group, membership, total = self._group, self._membership, self.schedule.at(step)
        assert group is not None and membership is not None
        self._virtual_workers = total
        self._shares = membership.shares(total, equal=self.equal_shares)
        self.gradients.close()
        sharding, topology = self.state.sharding, membership.topology
        needed = None if sharding is None else sharding.needed()
        self.gradients.open(group, self._shares, total, self.exact, topology, needed)

    def close(self) -> None:
        """Undoes what is not committed and releases the group."""
        self.committed.drop()  # the next generation may use their memory
        self.gradients.drop()
        self.gradients.close()
        self.buffers.undo()
        self._group = None

    def finished_nodes(self, step: int) -> tuple[Node, ...]:
        """Returns the subtrees of virtual workers that this worker has finished of an aborted
        attempt at `step`, as ranges of those that a membership distributes."""
        finished = self._finished
        if finished is None or finished.inputs.step != step:
            return ()
        return whole_blocks(finished.nodes, self.schedule.first, self.schedule.at(step))

    def forget_finished(self) -> None:
        """Forgets what is finished of an aborted step: the state is about to change."""
        self._finished = None

    def attempt(self, step: int) -> StepRecord | StopAgreed | RetryStep:
        """Attempts a step. Raises GroupError if it was not completed; then nothing was applied, and
        what this worker has finished of it is used in the next attempt."""
        outcome: StepRecord | StopAgreed | RetryStep | None = None
        try:
            outcome = self._attempt(step)
        except GroupError:
            self._keep_finished()
            raise
        finally:
            self._results = {}
            if outcome is not None:
                self._finished = None
        return outcome

    def _attempt(self, step: int) -> StepRecord | StopAgreed | RetryStep:
        group = self._group
        assert group is not None
        stop = self.control.stop_reason
        self.report("compute")
        self.committed.drop()
        if self.schedule.at(step) != self._virtual_workers:
            self._grow(step, group.rank)
        expected = float(sum(self.data.rows(step, v) for v in range(self._virtual_workers)))
        self.gradients.begin(rounding_seed(self.seed, step), measures=self._measures_noise(step))
        self.buffers.begin()
        if self.state.sharding is not None:
            self.state.sharding.begin()
        self.speed.begin()
        self._begin_finished(step, stop, expected)
        results = self._run_mine(step, stop, expected)
        self.report("collective")
        self.gradients.send()
        self.pass_point("sent", step)
        extremes: list[torch.Tensor] | None = None
        if group.on_device is None:
            lengths = self._launch_header(step, results, stop)
            self.pass_point("exchange", step)
            self.gradients.reduce()  # while the last bucket and the header are on their way
            self.pass_point("gather", step)
        else:
            extremes = self._read_device(step, results)
            lengths = self._launch_header(step, results, stop)
        header = self._collect_headers(step, *lengths)
        if group.on_device is not None:  # what follows in this step is not on the device
            group.on_device.agree(step, connected=header.connected, why_not=header.why_not)
        if header.stop is not None:
            self._undo()
            if self.state.sharding is not None and self.checkpoint_planned is not None:
                self.state.sharding.gather_whole()  # for the run's last checkpoint
            self.control.commit()
            return StopAgreed(header.stop)
        if header.late:
            self.gradients.settle()
            self.gradients.add_sequentially()
            self._undo()
            return RetryStep()
        if header.bad:
            self.data.check_bad(self.state.bad_row_groups | header.bad)
        results = self.micro_batches.counting(step, header.results)
        weight, loss_scale = total_weight(step, results.values()), self.state.loss_scale
        expected *= 1 if self.gang is None else self.gang.size  # `fully_shard` takes the mean
        factor = (expected / weight if weight else 1.0) / (loss_scale.scale if loss_scale else 1.0)
        buffers = self._exchange_buffers(step, header.changed)
        norm = None
        if self._sharding is not None:
            planned, agreed = self.checkpoint_planned, header.keep and not header.keeps_late
            norm = prepare_step(
                self._sharding,
                self.gradients,
                self.weights,
                step,
                factor,
                header.used,
                self.clip_norm,
                self.pass_point,
                gather_whole=planned is not None and (agreed or planned(step)),
            )
            finite = norm is not None
        elif extremes is None:
            finite = self.gradients.complete(factor)
        else:
            finite = self.gradients.finish(factor, extremes)
        if not finite and loss_scale is None:
            raise LossError(
                f"the gradient of step {step} is not finite although every loss is; the rows were: "
                + "; ".join(self.data.describe(step, v) for v in sorted(results)[:4])
            )
        group.check()
        self.speed.end_step()
        self.pass_point("before_commit", step)
        self.control.commit()
        self.pass_point("after_commit", step)
        self.state.skip_row_groups(header.bad)
        self.data.mark_bad(header.bad)
        record = self._apply(step, results, weight, finite, header, buffers, norm)
        if record.kept:
            self.control.checkpoint_agreed()
        return record

    # ------------------------------------------------------------------- up to the commit

    def _grow(self, step: int, rank: int) -> None:
        """Goes on with the number of virtual workers of `step`, which is another one."""
        assert self._membership is not None
        self._distribute(step)
        self.data.read_ahead(step, self.share(self._membership, rank, step))

    def _run_mine(
        self, step: int, stop: str | None, expected: float
    ) -> dict[int, MicroBatchResult]:
        """Runs this worker's virtual workers, forward and backward."""
        assert self._group is not None
        share = self._shares[self._group.rank]
        last = share[-1][1]
        results = self._results = {}
        for first, limit in share:
            leaves = fold(first, limit, self._virtual_workers)
            reused_until = first
            for leaf in leaves:
                v = leaf.virtual_worker
                if v < reused_until:
                    continue
                self.control.may_continue()
                if (node := self._reuse(leaves, v, limit, last)) is not None:
                    reused_until = node[1]
                else:
                    self._run_leaf(leaf, v == last - 1, step, stop, expected)
        return results

    def _run_leaf(
        self, leaf: Leaf, is_last: bool, step: int, stop: str | None, expected: float
    ) -> None:
        v = leaf.virtual_worker
        self.gradients.before_leaf(leaf, is_last)
        loss = None
        if stop is None and self.data.rows(step, v) > 0:
            self.pass_point("before_forward", step)
            batch = self.micro_batches.batch(step, v)
            loss, self._results[v] = self.micro_batches.forward(batch, step, v, expected)
            self.pass_point("forward", step)
            self.gradients.before_backward()
        if loss is None and stop is None:
            refuse_none(self.gang, step, v)
        if loss is not None:
            self.pass_point("backward", step)
            loss.backward()
        self.buffers.after_leaf(v, contributes=loss is not None)
        self.gradients.after_leaf(leaf, is_last)
        if loss is not None and self._measures_noise(step):
            self._results[v].measure(LEAF_SQUARE, self.gradients.leaf_square())
        self.speed.end_micro_batch()

    def _measures_noise(self, step: int) -> bool:
        return self.noise_scale_every is not None and step % self.noise_scale_every == 0

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

    def _reuse(self, leaves: Sequence[Leaf], v: int, limit: int, last: int) -> Node | None:
        """Adds the finished node that begins at `v`, if there is one. Returns it.

        `leaves` are those of the range of `v`, which ends at `limit`; `last` is the end of the
        worker's last range.
        """
        taken = self._finished.take(v, limit) if self._finished is not None else None
        if taken is None:
            return None
        (low, high), finished = taken
        final = leaves[high - 1 - leaves[0].virtual_worker]
        merges = final.merges - fold(low, high, self._virtual_workers)[-1].merges
        self.gradients.add_finished((low, high), finished.gradients, merges, high == last)
        self._results.update(finished.results)
        self.buffers.reuse(finished.buffers)
        return low, high

    def _keep_finished(self) -> None:
        """Keeps what is finished of the step that was aborted."""
        if self._finished is None or self.gang is not None:
            return  # a gang's processes have not finished the same
        step = self._finished.inputs.step
        for node, gradients in self.gradients.finished().items():
            results = {v: r for v, r in self._results.items() if node[0] <= v < node[1]}
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
        self.gradients.reduce()
        self.pass_point("gather", step)
        extremes = self.gradients.arrive()
        buffers = self.buffers.unread()
        values = [value for result in results.values() for value in result.unread.values()]
        read = self._group.on_device.read([*extremes, *buffers, *values])
        of_values = iter(read[len(extremes) + len(buffers) :])
        for result in results.values():
            result.take([next(of_values).reshape(1).tolist()[0] for _ in result.unread])
        self.buffers.take(read[len(extremes) : len(extremes) + len(buffers)])
        return read[: len(extremes)]

    def _launch_header(
        self, step: int, results: Mapping[int, MicroBatchResult], stop: str | None
    ) -> tuple[int, int]:
        """Sends the header. Returns its numbers of flags for parameters and for buffers."""
        assert self._group is not None
        on_device = self._group.on_device
        connects = on_device is not None and not on_device.switched
        bad = frozenset[int]().union(*(self.data.bad_row_groups(step, v) for v in results))
        header = MemberHeader(
            late=self.gradients.late,
            used=self.gradients.used,
            changed=self.buffers.changed(),
            results=results,
            stop=stop,
            keep=self.control.checkpoint_wanted,
            keeps_late=self.control.checkpoint_late,
            bad=bad - self.state.bad_row_groups,
            weights=self.weights.digest(step - 1),
            connected=on_device.connected if on_device is not None and connects else None,
            why_not=on_device.connecting_failure() if on_device is not None and connects else None,
        )
        self._header.launch(record_of_gang(self.gang, header, self.gradients.order))
        self.pass_point("header", step)
        return len(header.used), len(header.changed)

    def _collect_headers(self, step: int, used: int, changed: int) -> StepHeader:
        header = StepHeader.of(self._header.collect(), used, changed)
        self.weights.compare(step - 1, header.weights)
        return header

    def _exchange_buffers(self, step: int, changed: list[int]) -> dict[int, torch.Tensor | bytes]:
        if not changed:
            return {}
        refuse_change(self.gang, step)
        self._values.launch(self.buffers.payload(changed))
        self.pass_point("buffers", step)
        return self.buffers.combine(self._values.collect(), changed, self._virtual_workers)

    @property
    def _sharding(self) -> ShardedOptimizer | None:
        """Has this worker's part of the gradient and the state; None: it has all of them."""
        sharding = self.state.sharding
        return None if sharding is None or sharding.all_hold_all else sharding

    def _undo(self) -> None:
        self.gradients.drop()
        self.buffers.undo()

    # ---------------------------------------------------------------------- from the commit

    def _apply(
        self,
        step: int,
        results: Mapping[int, MicroBatchResult],
        weight: float,
        finite: bool,
        header: StepHeader,
        buffers: Mapping[int, torch.Tensor | bytes],
        norm: torch.Tensor | None = None,
    ) -> StepRecord:
        self.report("apply")
        state = self.state
        lr = float(state.optimizer.param_groups[0]["lr"])  # the scheduler changes it below
        seed_everything(body_seed(self.seed, step))
        grad_norm = None if norm is None else float(norm)
        if norm is None:
            self.gradients.assign(header.used)
            self.committed.take()
        self.buffers.commit(buffers)
        noise: dict[str, float] = {}
        if self._measures_noise(step):
            expected = float(sum(self.data.rows(step, v) for v in range(self._virtual_workers)))
            scaled = expected / (state.loss_scale.scale if state.loss_scale else 1.0)
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
        if state.loss_scale is not None:
            state.loss_scale.step_ended(overflow=not finite)
        # A member that takes the step over has no gradients for its body, so no member's body has.
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
            kept=header.keep and not header.keeps_late,
            late=header.keeps_late,
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
        """Adds the norm of the last committed step's gradients to its record, unless it is there
        or they are gone."""
        if self.state.record is not None:
            self.committed.complete(self.state.record)
