"""How a worker gets the run's state when a generation begins: from another member or a checkpoint.

`plan_state_transfer` depends only on the membership and the worker's own position, so all members
make the same plan. `StateTransfer` executes it.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from elastic_dp.coordinator.messages import Membership, TrainingPosition, WorkerId
from elastic_dp.distributed.process_group import ProcessGroup
from elastic_dp.distributed.tensor_broadcast import StatePayload, send
from elastic_dp.train.checkpointing.worker_checkpointer import WorkerCheckpointer
from elastic_dp.train.gang.gang import Gang
from elastic_dp.train.generations.worker_control import WorkerControl
from elastic_dp.train.generations.worker_progress import WorkerProgress
from elastic_dp.train.phase_reporter import PhaseReporter
from elastic_dp.train.state.module_buffers import ModuleBuffers
from elastic_dp.train.state.state_payload import (
    pack_state,
    receive_state,
    serialize_state,
    unpack_state,
)
from elastic_dp.train.state.train_state import TrainState
from elastic_dp.train.state.weight_comparison import WeightComparison
from elastic_dp.train.step.batch_source import BatchSource


class TransferRole(enum.Enum):
    NONE = enum.auto()  # this worker neither needs state nor sends it
    SEND = enum.auto()
    RECEIVE = enum.auto()
    RESTORE = enum.auto()  # all members read the newest checkpoint together


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """What this worker does.

    `ranks` are those of all members that send or receive state, the source first.
    """

    role: TransferRole
    ranks: Sequence[int] = ()


def plan_state_transfer(
    membership: Membership, worker: WorkerId, position: TrainingPosition
) -> TransferPlan:
    """Returns the plan for `worker`, which is at `position`."""
    ranks = state_transfer_ranks(membership, membership.rank(worker), position)
    if membership.restore:
        return TransferPlan(TransferRole.RESTORE, ranks)
    if not ranks:
        return TransferPlan(TransferRole.NONE)
    sends = membership.source == worker
    return TransferPlan(TransferRole.SEND if sends else TransferRole.RECEIVE, ranks)


def state_transfer_ranks(
    membership: Membership, rank: int, position: TrainingPosition
) -> list[int]:
    """Returns the ranks that send or receive state, the source first.

    The list is empty if `rank`, at `position`, is not one of them.
    """
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
    """Executes the plan of one worker, once a group is formed for it: `send`, `receive` or
    `restore`."""

    def __init__(
        self,
        state: TrainState,
        buffers: ModuleBuffers,
        weights: WeightComparison,
        data: BatchSource,
        progress: WorkerProgress,
        control: WorkerControl,
        reporter: PhaseReporter,
        device: torch.device,
        total_steps: int,
        gang: Gang | None = None,
    ) -> None:
        self._state, self._buffers, self._weights, self._data = state, buffers, weights, data
        self._progress, self._control, self._reporter = progress, control, reporter
        self._device, self._total_steps = device, total_steps
        self._gang = gang

    def payload(self) -> StatePayload:
        """Returns everything that another member may need. Needs no group, so it runs while one
        forms."""
        progress = self._progress
        tree = self._state.tree(progress.evaluations, progress.ended)
        ours = {
            "position": list(progress.position),
            "of_finished_bodies": progress.of_finished_bodies(),
        }
        return serialize_state(tree | ours | {"agreed": self._weights.agreed})

    def send(self, group: ProcessGroup, payload: StatePayload) -> None:
        self._reporter.report("give")
        self._reporter.pass_point("sending_state")
        send(group, payload)

    def receive(self, group: ProcessGroup, lineage_id: int) -> int:
        """Receives the state, all of it or nothing. Returns the number of bytes received."""
        self._reporter.report("receive")
        self._reporter.pass_point("receiving_state")
        joins = not self._progress.has_state
        targets = self._state.own_tensors if joins else None
        tree, nbytes = receive_state(group, self._device, targets)
        self._control.may_continue()
        position = TrainingPosition(*tree["position"])
        if joins or position.step > self._progress.position.step:
            self._state.adopt(tree, body=joins)
            self._state_changed(agreed=tree["agreed"])
            if joins:
                self._progress.joined(*tree["of_finished_bodies"])
            else:
                self._progress.another_body_begins()
            record = self._state.record
            if record is not None and record.kept and not joins:
                self._control.checkpoint_agreed()  # all members agreed on a checkpoint of this step
        # Otherwise the source was ahead only by an evaluation or the end of the run, and this
        # worker keeps the hyper-parameters that its own body set.
        self._progress.took_over(position, tree["evaluations"], tree["ended"], lineage_id)
        return nbytes

    def restore(
        self,
        group: ProcessGroup | None,
        membership: Membership,
        checkpoints: WorkerCheckpointer | None,
    ) -> None:
        """Restores the newest checkpoint, together with all members. The first process of a worker
        has `checkpoints`, and hands out what it reads."""
        if checkpoints is None:
            self._restore_part()
            return

        def enters(phase: str) -> None:
            self._reporter.report(phase)
            self._reporter.pass_point({"restore": "restoring", "receive": "sharing"}[phase])

        alone = ProcessGroup(None, 0, 1, self._device)
        share = None if self._gang is None else self._share
        commit, evaluations, log_calls = checkpoints.restore(
            self._state, group or alone, membership, self._device, enters, share
        )
        self._restored(commit.step, evaluations, log_calls)

    def _restore_part(self) -> None:
        """Takes over what the first process of this worker has restored for this one."""
        assert self._gang is not None
        self._reporter.report("restore")
        self._reporter.pass_point("restoring")
        content = torch.frombuffer(bytearray(self._gang.control.part()), dtype=torch.uint8)
        tree = unpack_state(content, self._device)
        self._state.adopt(tree, body=True)
        self._restored(tree["restored"], tree["evaluations"], tree["log_calls"])

    def _share(self, tree: Any, step: int, device_types: Mapping[str, str]) -> Any:
        """Hands out a restored state to the processes of this worker. Returns the part of this
        one. `device_types`: see `rehome_state`."""
        assert self._gang is not None
        tree = tree | {"restored": step}
        parts = [self._state.part(tree, process) for process in range(self._gang.size)]
        flat = [pack_state(part, device_types).numpy().tobytes() for part in parts[1:]]
        self._gang.control.hand_out(flat)
        return parts[0]

    def _restored(self, step: int, evaluations: list[dict[str, float]], log_calls: int) -> None:
        self._state_changed(agreed=step)
        is_last = bool(self._total_steps and step >= self._total_steps)
        self._progress.restored(step, evaluations, log_calls, is_last=is_last)

    def _state_changed(self, agreed: int) -> None:
        self._data.mark_bad(self._state.bad_row_groups)
        self._buffers.reload()
        self._weights.agreed_at(agreed)
