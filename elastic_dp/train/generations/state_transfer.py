"""How a worker gets the run's state when a generation begins: from other members or a checkpoint.

`plan_state_transfer` depends only on the membership, so all members make the same plan.
`StateTransfer` executes it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch

from elastic_dp.checkpoint.layout import TensorSpec, flat_bytes
from elastic_dp.coordinator.messages import Membership, TrainingPosition
from elastic_dp.distributed.process_group import ProcessGroup
from elastic_dp.train.state.state_moves import StateUnit, hand_out, move, units_of
from elastic_dp.train.state.state_payload import (
    DIGEST_BYTES,
    LENGTH_BYTES,
    StatePayload,
    from_vector,
    to_vectors,
)

if TYPE_CHECKING:
    from elastic_dp.train.worker_session import WorkerSession

# What a step changes has the same bits on all members at one step, so any of them can send it. What
# the loop body changes may differ, so all of it comes from the source.
_ANY_MEMBER_SENDS = ("step.parameters.", "step.optimizer.")
SHORT_S = 0.1  # a copy that takes no longer stops the others less than a move in parts slows them
_USUAL_BYTES_PER_S = 1e9  # before the first copy
_LEAST_MEASURED_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """`receivers` are the ranks of members that lack the state of `source`. The others have it."""

    restores: bool  # all members read the newest checkpoint together
    source: int
    receivers: Sequence[int]


def plan_state_transfer(membership: Membership) -> TransferPlan:
    members, source = membership.members, membership.rank(membership.source)
    truth = members[source].position
    receivers = [
        rank
        for rank, member in enumerate(members)
        if rank != source and (not member.has_state or member.position < truth)
    ]
    return TransferPlan(membership.restore, source, receivers)


def _moved(payload: StatePayload) -> list[TensorSpec]:
    return [spec for spec in payload.specs if spec.name.startswith(_ANY_MEMBER_SENDS)]


class StateTransfer:
    """Executes the plan of one worker, once a group is formed: `move` or `restore`."""

    def __init__(self, session: WorkerSession) -> None:
        self._session = session
        self._state, self._progress, self._gang = session.state, session.progress, session.gang
        self._moved: Sequence[TensorSpec] = ()  # what travels in parts
        self._bytes_per_s = _USUAL_BYTES_PER_S  # of the last copy

    def payload(self) -> StatePayload:
        """Returns all that another member may need. Runs while a group forms."""
        progress = self._progress
        tree = self._state.tree(progress.evaluations, progress.ended)
        ours = {
            "position": list(progress.position),
            "of_finished_bodies": progress.of_finished_bodies(),
        }
        return StatePayload.of(tree | ours | {"agreed": self._session.weights.agreed})

    def move(
        self, group: ProcessGroup, plan: TransferPlan, payload: StatePayload | None, lineage_id: int
    ) -> None:
        """Sends the state to the receivers of `plan`, or receives it: all of it or nothing.
        `payload`: of a member that has the state. Raises GroupError."""
        self._enters(sends=payload is not None)
        told, alike = self._tell(group, plan, payload)
        self._move(group, plan, told, alike)
        if payload is None and group.rank in plan.receivers:
            self._adopt(told, lineage_id)

    def begin_join(
        self,
        group: ProcessGroup,
        plan: TransferPlan,
        payload: StatePayload | None,
        kept: int | None,
    ) -> tuple[bool, bool]:
        """Lets the receivers of `plan` make room for the state, to be written in parts
        (gradual_join.py). `kept`: the step whose state the parts are of that have arrived in an
        earlier generation. Returns whether this member can give or take the state so, unless a
        copy at once is short, and whether it keeps these parts. Raises GroupError."""
        self._enters(sends=payload is not None)
        told, _ = self._tell(group, plan, payload)
        before, self._moved = self._moved, _moved(told)
        if payload is not None:
            nbytes = sum(spec.nbytes for spec in self._moved)
            return nbytes > SHORT_S * self._bytes_per_s, False
        tree = told.tree()
        position = TrainingPosition(*tree["position"])
        keeps = kept == position.step and before == self._moved
        self._progress.position = position  # it makes the steps of the others from here on
        return self._state.prepare_to_join(tree, anew=not keeps), keeps

    def complete_join(
        self, group: ProcessGroup, plan: TransferPlan, payload: StatePayload | None, lineage_id: int
    ) -> None:
        """Moves what does not travel in parts; all, where the tensors are others now."""
        told, alike = self._tell(group, plan, payload)
        self._move(group, plan, told, alike, arrived=_moved(told) == self._moved)
        if payload is None:
            self._adopt(told, lineage_id)

    def _enters(self, *, sends: bool) -> None:
        self._session.report("give" if sends else "receive")
        self._session.pass_point("sending_state" if sends else "receiving_state")

    def _tell(
        self, group: ProcessGroup, plan: TransferPlan, payload: StatePayload | None
    ) -> tuple[StatePayload, Sequence[int]]:
        """Tells all members what the source's state consists of, and who holds the same tensors."""
        ours = bytes(DIGEST_BYTES + LENGTH_BYTES)
        if payload is not None:
            ours = payload.digest + len(payload.text).to_bytes(LENGTH_BYTES, "little")
        told = group.gather_equal(ours)
        digests = [one[:DIGEST_BYTES] for one in told]
        nbytes_of_text = int.from_bytes(told[plan.source][DIGEST_BYTES:], "little")
        alike = [rank for rank, one in enumerate(digests) if one == digests[plan.source]]
        others = [rank for rank in range(group.world_size) if rank not in alike]
        text = payload.text if payload is not None and group.rank in alike else b""
        text = hand_out(group, text, plan.source, others, nbytes_of_text)
        if payload is None:
            targets = None if self._progress.has_state else self._state.own_tensors
            payload = StatePayload.receive(text, self._session.device, targets)
        elif group.rank not in alike:  # its loop body keeps state of another kind, so it sends none
            payload = StatePayload.receive(text, torch.device("meta"), None)
        return payload, alike

    def _move(
        self,
        group: ProcessGroup,
        plan: TransferPlan,
        payload: StatePayload,
        alike: Sequence[int],
        *,
        arrived: bool = False,
    ) -> None:
        """Moves the tensors; those that any member sends only if they have not `arrived`."""
        units, have = list[StateUnit](), list[Sequence[int]]()
        by_any = (spec.name.startswith(_ANY_MEMBER_SENDS) for spec in payload.specs)
        pairs = zip(by_any, payload.tensors, strict=True)
        for any_sends, some in groupby(pairs, key=itemgetter(0)):
            if any_sends and arrived:
                continue
            parts = units_of(*(flat_bytes(tensor) for _, tensor in some))
            units += parts
            have += [alike if any_sends else [plan.source]] * len(parts)
        began, nbytes = time.monotonic(), sum(unit.nbytes for unit in units)
        move(group, units, have, [plan.receivers] * len(units))
        if nbytes >= _LEAST_MEASURED_BYTES:
            self._bytes_per_s = nbytes / (time.monotonic() - began)

    def _adopt(self, payload: StatePayload, lineage_id: int) -> None:
        tree, joins = payload.tree(), not self._progress.has_state
        self._session.control.may_continue()
        position = TrainingPosition(*tree["position"])
        if joins or position.step > self._progress.position.step:
            self._state.adopt(tree, body=joins)
            self._state_changed(agreed=tree["agreed"])
            if joins:
                self._progress.joined(*tree["of_finished_bodies"])
            else:
                self._progress.evaluations_begun = 0  # this worker runs the body of that step
            record = self._state.record
            if record is not None and record.kept and not joins:
                # All members agreed on a checkpoint of this step.
                self._session.control.checkpoint_wanted = False
        # Otherwise the source was ahead only by an evaluation or the end of the run, and this
        # worker keeps the hyper-parameters that its own body set.
        self._progress.took_over(position, tree["evaluations"], tree["ended"], lineage_id)

    def restore(self, group: ProcessGroup) -> None:
        """Restores the newest checkpoint, together with all members. The first process of a worker
        has checkpoints, and hands out what it reads."""
        checkpoints = self._session.checkpoints
        if checkpoints is None:
            self._restore_part()
            return

        def enters(phase: str) -> None:
            self._session.report(phase)
            self._session.pass_point({"restore": "restoring", "receive": "sharing"}[phase])

        share = None if self._gang is None else self._share
        self._restored(*checkpoints.restore(group, enters, share))

    def _restore_part(self) -> None:
        """Takes over what the first process of this worker has restored for this one."""
        assert self._gang is not None
        self._session.report("restore")
        self._session.pass_point("restoring")
        content = torch.frombuffer(bytearray(self._gang.control.scatter(())), dtype=torch.uint8)
        tree = from_vector(content, self._session.device)
        self._state.adopt(tree, body=True)
        self._restored(tree["restored"], tree)

    def _share(self, tree: Any, step: int, device_types: Mapping[str, str]) -> Any:
        """Hands out a restored state to this worker's processes. Returns the part of this one."""
        assert self._gang is not None
        tree = tree | {"restored": step}
        parts = [self._state.part(tree, process) for process in range(self._gang.size)]
        vectors = [torch.cat(to_vectors(part, device_types)) for part in parts[1:]]
        self._gang.control.scatter([flat.numpy().tobytes() for flat in vectors])
        return parts[0]

    def _restored(self, step: int, tree: Mapping[str, Any]) -> None:
        self._state_changed(agreed=step)
        total_steps = self._session.total_steps
        is_last = bool(total_steps and step >= total_steps)
        self._progress.restored(step, tree["evaluations"], tree["log_calls"], is_last=is_last)

    def _state_changed(self, agreed: int) -> None:
        self._session.data.mark_bad(self._state.bad_row_groups)
        self._session.transaction.leaves.buffers.reload()
        self._session.weights.agreed = agreed
