"""One worker's part in the run's checkpoints: a snapshot at the head of the loop, and its share
written in the background.

- All members take snapshots of the same steps: those that `CheckpointConfig` names, those that the
  loop body requested, and those that the members agreed on in the header of the step before (a
  controller's request reaches one member, and through the header all of them).
- A slow store does not stop training: while any member's last upload is late, as the headers tell,
  all members leave out every checkpoint but the run's last one, and request it again until it is
  made.
- Each member holds the whole state of the step, so each can write a part that another one did not.
- A checkpoint holds nothing that differs between members (rank, when it was restored): all hold the
  same bytes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from elastic_dp.checkpoint.catalog import Catalog
from elastic_dp.checkpoint.checkpoint_reader import device_types, whole_tree
from elastic_dp.checkpoint.checkpoint_writer import Share
from elastic_dp.checkpoint.commit_record import CommitMetadata, CommitRecord, Manifest
from elastic_dp.checkpoint.encoding import encode
from elastic_dp.checkpoint.state_dict_names import naming_of
from elastic_dp.checkpoint.uploader import Uploader
from elastic_dp.config import CheckpointConfig
from elastic_dp.coordinator.messages import Signature, WorkerId
from elastic_dp.distributed.process_group import ProcessGroup
from elastic_dp.errors import CheckpointDamaged, StateError, StorageError
from elastic_dp.train.checkpointing.collective_read import read_collectively
from elastic_dp.train.checkpointing.job_match import (
    changed_hyperparameters,
    changed_total_steps,
    check_fits,
    check_job,
    hyperparameters_of,
)
from elastic_dp.train.checkpointing.orphan_checkpoint import commit_without_controller
from elastic_dp.train.controller_link import ControllerLink, WrittenParts
from elastic_dp.train.state.state_payload import rehome_state
from elastic_dp.train.state.train_state import TrainState, types_of


class WorkerCheckpointer:
    """`write` is called by the control thread, every other method by the training thread."""

    def __init__(
        self,
        catalog: Catalog,
        config: CheckpointConfig,
        worker: str,
        link: ControllerLink,
        lease_token: str = "",
        lease_s: float = 60.0,
    ) -> None:
        """`lease_token`, `lease_s`: of the controller's lease on the run, for a worker that has
        lost its controller."""
        self._catalog, self._config = catalog, config
        self._lease_token, self._lease_s = lease_token, lease_s
        self._worker, self._link = worker, link
        self._uploader = Uploader(catalog, self._wrote)
        self._taken = 0  # the step of the newest snapshot, or of the checkpoint that was restored
        self._requested = False  # by the body
        self._stall_s = 0.0
        self._members: tuple[WorkerId, ...] = ()
        self._founded = 0
        self._naming: dict[str, Any] = {}
        self._versions: dict[str, str] = {}
        self._job = self._data = ""

    def request(self) -> None:
        """The loop body requests a checkpoint of this step."""
        self._requested = True

    def open(
        self,
        state: TrainState,
        signature: Signature,
        job: Mapping[str, Any],
        total_steps: int | None,
    ) -> None:
        """Before anything is trained: raises StateError if something of the state cannot be stored.
        `job`: what else than the data decides the result, by name. `total_steps`: of the run, where
        the train function has read it."""
        made = hyperparameters_of(state.optimizer, state.scheduler, total_steps)
        self._naming = naming_of(state.model, state.optimizer) | {"made": made, "job": dict(job)}
        software = {name.lower(): version for name, version in signature.software}
        self._job, self._data = software.pop("code", ""), signature.data
        self._versions = software | {"python": platform.python_version(), "kind": signature.kind}
        if self._config.enabled:
            encode(_tree(state, []))

    @property
    def late(self) -> bool:
        """Whether the last upload takes so long that training goes on without the next
        checkpoint."""
        return self._uploader.late

    def ready(self, step: int) -> bool:
        """Whether `take` will not wait. If not, this checkpoint is left out, and the user is told
        so."""
        was_late = self.late
        if self._uploader.ready():
            return True
        if not was_late:
            before = self._uploader.snapshot.step
            self._link.say(
                f"{self._worker}: no checkpoint of step {step} yet: that of step {before} is "
                "still being written; "
                "training goes on"
            )
        return False

    def defer(self) -> None:
        """Treat what the loop body requested like a request of the controller: a later step will
        do."""
        self._requested = False

    def due(self, step: int, agreed: bool, ended: bool) -> bool:
        """At the head of the loop after `step`. The last step always is."""
        if step <= self._taken:
            return False
        every = self._config.every_steps
        return agreed or self._requested or (every is not None and step % every == 0) or ended

    def take(
        self,
        state: TrainState,
        step: int,
        evaluations: Sequence[dict[str, float]],
        members: tuple[WorkerId, ...],
        lineage_id: int,
    ) -> None:
        """Raises StateError if something in the state cannot be stored, where the job makes
        checkpoints of its own; one that only others requested is then not made, and the user is
        told so."""
        by_job = self._requested or self._config.enabled
        self._taken, self._requested = step, False
        try:
            self._uploader.wait()
        except StorageError as error:  # that one is lost, and training goes on
            self._link.say(f"{self._worker}: no checkpoint: {error}")
        tree = _tree(state, evaluations)
        self._members, self._founded = members, lineage_id
        rank = members.index(self._worker)
        try:
            upload = self._uploader.take(step, tree, rank, len(members), writer=self._worker)
            self._stall_s = upload.stall_s
        except StateError as error:
            if by_job:
                raise
            self._link.say(f"{self._worker}: no checkpoint of step {step}: {error}")

    def writing(self, step: int) -> bool:
        return self.busy and self._taken == step

    @property
    def busy(self) -> bool:
        """Whether this member's share of the newest one is still being written."""
        return self._uploader.busy

    def write(self, step: int, parts: Sequence[int]) -> None:
        """Write these parts, too, in place of a member that is lost."""
        self._uploader.write(step, parts, writer=self._worker)

    def commit_without_controller(
        self, state: TrainState, step: int, evaluations: Sequence[dict[str, float]]
    ) -> None:
        """At the head of the loop, when no controller has answered for long: see
        orphan_checkpoint.py. Says what came of it."""
        with contextlib.suppress(StorageError):
            self._uploader.wait()
        snapshot = self._uploader.snapshot
        try:
            snapshot.take(step, _tree(state, evaluations))
        except StateError as error:
            self._link.say(f"{self._worker}: no last checkpoint: {error}")
            return
        said = commit_without_controller(
            self._catalog,
            snapshot,
            self._about,
            worker=self._worker,
            token=self._lease_token,
            lease_s=self._lease_s,
        )
        self._link.say(f"{self._worker}: {said}")

    def _about(self, before: CommitMetadata | None) -> CommitMetadata:
        losses, observed_s = (0, 0.0) if before is None else (before.losses, before.observed_s)
        return CommitMetadata(
            job=self._job,
            data=self._data,
            versions=self._versions,
            naming=self._naming,
            saved_at=time.time(),
            losses=losses,
            observed_s=observed_s,
        )

    def restore(
        self,
        state: TrainState,
        group: ProcessGroup,
        device: torch.device,
        enters: Callable[[str], None],
    ) -> tuple[CommitRecord, list[dict[str, float]]]:
        """Load the newest intact checkpoint, together with all members of `group`.
        Returns it, and what its step's body evaluated. `enters`: see `read_collectively`.

        Raises RunMismatch if it is not of this job."""

        def damaged(error: CheckpointDamaged) -> None:
            self._link.say(f"{self._worker}: {error}; taking the one before it")

        commit, line = read_collectively(self._catalog, group, enters=enters, damaged=damaged)
        types = types_of(state)
        check_job(commit.metadata, self._naming["job"], self._data)
        tree = whole_tree(commit, line, types=types)
        kind = group.gather_bytes(self._versions["kind"].encode())[0].decode()
        kinds = tree["step"].setdefault(
            "kinds", [commit.metadata.versions["kind"]]
        )  # absent at first
        warnings = []
        if kind not in kinds:
            kinds.append(kind)
            warnings.append(
                f"goes on from step {commit.step} on {kind!r}, another kind of machine than "
                f"{kinds[-2]!r}"
            )
        check_fits(tree, commit.metadata.naming, state)
        made = commit.metadata.naming.get("made", {})
        if texts := changed_hyperparameters(made, self._naming["made"]):
            warnings.append(
                f"{'; '.join(texts)}. The values of the checkpoint of step {commit.step} "
                "count, as after "
                "load_state_dict; to change them in this run, set them in the loop's body"
            )
        warnings += changed_total_steps(made, self._naming["made"], commit.step)
        if group.rank == 0:  # the others have nothing else to say
            self._link.say(f"going on from step {commit.step}")
            for text in warnings:
                self._link.say(f"WARNING: {text}")
        places = device_types(commit)
        state.adopt(rehome_state(tree, device, types, state.own_tensors, places), body=True)
        self._taken = commit.step
        return commit, tree["evaluations"]

    def close(self) -> None:
        """Wait until the upload under way has ended."""
        self._uploader.close()

    def _wrote(self, share: Share, manifest: Manifest) -> None:
        written = WrittenParts(
            share,
            self._members,
            manifest,
            self._naming,
            self._versions,
            self._stall_s + self._uploader.snapshot.copied_s,
            self._founded,
            self._job,
            self._data,
        )
        self._link.wrote(self._worker, written)


def _tree(state: TrainState, evaluations: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Equal on all members: without what one may have computed, and another not."""
    tree = state.tree(evaluations, None)
    if state.record is not None:
        tree["step"]["record"] = dataclasses.replace(state.record, grad_norm=None)
    return tree
