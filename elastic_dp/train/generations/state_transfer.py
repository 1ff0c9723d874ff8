"""How a worker gets the run's state when a generation begins: from another member, or from a
checkpoint.

`plan_state_transfer` depends on the membership and on the worker's own position alone, so all
members come to the same plan; `StateTransfer` carries it out.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from elastic_dp.coordinator.messages import Membership, TrainingPosition, WorkerId
from elastic_dp.distributed.process_group import ProcessGroup
from elastic_dp.distributed.tensor_broadcast import StatePayload, send
from elastic_dp.train.checkpointing.worker_checkpointer import WorkerCheckpointer
from elastic_dp.train.generations.worker_control import WorkerControl
from elastic_dp.train.generations.worker_progress import WorkerProgress
from elastic_dp.train.phase_reporter import PhaseReporter
from elastic_dp.train.state.state_payload import receive_state, serialize_state
from elastic_dp.train.state.step_buffers import StepBuffers
from elastic_dp.train.state.train_state import TrainState, types_of
from elastic_dp.train.state.weight_comparison import WeightComparison
from elastic_dp.train.step.batch_source import BatchSource


class TransferRole(enum.Enum):
    NONE = enum.auto()  # this worker has what it needs, and nobody needs it of this one
    GIVE = enum.auto()
    TAKE = enum.auto()
    RESTORE = enum.auto()  # all members read the newest checkpoint together


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """What this worker does; `ranks`: of all between whom state travels, the source first."""

    role: TransferRole
    ranks: Sequence[int] = ()


def plan_state_transfer(
    membership: Membership, worker: WorkerId, position: TrainingPosition
) -> TransferPlan:
    """For `worker`, which is at `position`."""
    ranks = state_transfer_ranks(membership, membership.rank(worker), position)
    if membership.restore:
        return TransferPlan(TransferRole.RESTORE, ranks)
    if not ranks:
        return TransferPlan(TransferRole.NONE)
    gives = membership.source == worker
    return TransferPlan(TransferRole.GIVE if gives else TransferRole.TAKE, ranks)


def state_transfer_ranks(
    membership: Membership, rank: int, position: TrainingPosition
) -> list[int]:
    """The ranks between which state travels, the source first; empty if `rank` (at `position`) is
    not one."""
    members = membership.members
    source = membership.rank(membership.source)
    first = not any(member.has_state for member in members)
    truth = position if first else members[source].position
    receivers = [
        r
        for r, member in enumerate(members)
        if r != source and (not member.has_state or member.position < truth)
    ]
    involved = [source, *receivers]
    return involved if receivers and rank in involved else []


class StateTransfer:
    """Of one worker: `give`, `take` or `restore`, once a group is formed for it."""

    def __init__(
        self,
        state: TrainState,
        buffers: StepBuffers,
        weights: WeightComparison,
        data: BatchSource,
        progress: WorkerProgress,
        control: WorkerControl,
        reporter: PhaseReporter,
        device: torch.device,
        total_steps: int,
    ) -> None:
        self._state, self._buffers, self._weights, self._data = state, buffers, weights, data
        self._progress, self._control, self._reporter = progress, control, reporter
        self._device, self._total_steps = device, total_steps

    def payload(self) -> StatePayload:
        """All that another member may need. Needs no group, so it is made while one forms."""
        progress = self._progress
        tree = self._state.tree(progress.evaluations, progress.ended)
        ours = {"position": progress.position, "evaluations_in_loop": progress.evaluations_in_loop}
        return serialize_state(tree | ours | {"agreed": self._weights.agreed})

    def give(self, group: ProcessGroup, payload: StatePayload) -> None:
        self._reporter.report("give")
        self._reporter.pass_point("giving_state")
        send(group, payload)

    def take(self, group: ProcessGroup, lineage_id: int) -> int:
        """Returns the bytes taken. All or nothing changes."""
        self._reporter.report("receive")
        self._reporter.pass_point("taking_state")
        joins = not self._progress.has_state
        targets = self._state.own_tensors if joins else None
        tree, nbytes = receive_state(group, self._device, types_of(self._state), targets)
        self._control.may_continue()
        position = tree["position"]
        if joins or position.step > self._progress.position.step:
            self._state.adopt(tree, body=joins)
            self._state_changed(agreed=tree["agreed"])
            self._progress.another_body_begins(tree["evaluations_in_loop"] if joins else 0)
            record = self._state.record
            if record is not None and record.kept and not joins:
                self._control.checkpoint_agreed()  # this is the step that all agreed on
        # Else it was ahead only by an evaluation or the end: hyper-parameters that our body wrote
        # are ours to keep.
        self._progress.took_over(position, tree["evaluations"], tree["ended"], lineage_id)
        return nbytes

    def restore(self, group: ProcessGroup, checkpoints: WorkerCheckpointer) -> None:
        """From the newest checkpoint, as all members do."""

        def enters(phase: str) -> None:
            self._reporter.report(phase)
            self._reporter.pass_point({"restore": "restoring", "receive": "sharing"}[phase])

        commit, evaluations = checkpoints.restore(self._state, group, self._device, enters)
        self._state_changed(agreed=commit.step)
        is_last = bool(self._total_steps and commit.step >= self._total_steps)
        self._progress.restored(commit.step, evaluations, is_last=is_last)

    def _state_changed(self, agreed: int) -> None:
        self._data.mark_bad(self._state.bad_row_groups)
        self._buffers.reload()
        self._weights.agreed_at(agreed)
