"""One worker's part in checkpoints: a snapshot at the head of the loop, and a share written later.

- All members take snapshots of the same steps: those that `CheckpointConfig` names, those that the
  loop body requests, and those that the members agreed on in the header of the previous step (a
  controller's request reaches one member, and through the header all of them).
- A slow store does not stop training. While the last upload of any member is late, as the headers
  tell, all members skip every checkpoint except the run's last one, and request it again until it
  is taken.
- What a member was to write, another one that holds it can write.
- A checkpoint holds nothing that differs between members (such as the rank), so all members hold
  the same bytes.
"""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from elastic_dp.checkpoint.catalog import Catalog
from elastic_dp.checkpoint.checkpoint_reader import device_types, taking_apart
from elastic_dp.checkpoint.checkpoint_writer import WrittenBlobs
from elastic_dp.checkpoint.commit_record import CommitMetadata, CommitRecord
from elastic_dp.checkpoint.exporting import naming_of
from elastic_dp.checkpoint.uploader import Uploader
from elastic_dp.config import CheckpointConfig
from elastic_dp.coordinator.messages import Signature, WorkerId
from elastic_dp.distributed.local_shards import local_of
from elastic_dp.distributed.process_group import ProcessGroup
from elastic_dp.errors import (
    CheckpointDamaged,
    StateError,
    StorageError,
)
from elastic_dp.train.checkpointing.job_match import (
    GROWTH,
    changes_since,
    check_fits,
    check_job,
    hyperparameters_of,
    job_identity,
)
from elastic_dp.train.controller_link import ControllerLink
from elastic_dp.train.generations.worker_control import WorkerControl
from elastic_dp.train.generations.worker_progress import WorkerProgress
from elastic_dp.train.phase_reporter import PhaseReporter
from elastic_dp.train.state.state_payload import rehome_state
from elastic_dp.train.state.train_state import StepRecord, TrainState

if TYPE_CHECKING:
    from elastic_dp.train.steps_arguments import StepsArguments
    from elastic_dp.train.worker_session import WorkerSession

# Of `ctx.steps`, which may change when a run continues.
_OPTIONS = (
    *("precision", "clip_norm", "clip_value", "inner_clip_norm", "noise_scale_every"),
    "rounding_name",
)


class WorkerCheckpointer:
    """The checkpoints of one worker. The control thread calls `write`, the training thread every
    other method."""

    def __init__(
        self,
        catalog: Catalog,
        config: CheckpointConfig,
        worker: str,
        link: ControllerLink,
        lease_token: str = "",
        lease_s: float = 60.0,
    ) -> None:
        """`lease_token` and `lease_s` are those of the controller's lease on the run. A worker that
        has lost its controller needs them (checkpoint_without_controller.py)."""
        self._catalog, self._config = catalog, config
        self._lease_token, self._lease_s = lease_token, lease_s
        self._worker, self._link = worker, link
        self._uploader = Uploader(catalog, partial(link.wrote, worker))
        self._due_from = 1  # the first step of which a checkpoint may be due
        self._requested = False  # by the body
        self._holders: tuple[WorkerId, ...] = ()  # the members among whom pieces are divided
        self._metadata = CommitMetadata()
        self._prepared = False  # for the first snapshot

    def request(self) -> None:
        """The loop body requests a checkpoint of this step."""
        self._requested = True

    def open(self, session: WorkerSession, signature: Signature, given: StepsArguments) -> None:
        """Begins to take checkpoints of the session's state."""
        self._session, state, spec = session, session.state, session.spec
        total_steps = session.total_steps if session.loop.read_total_steps else None
        options = {name: getattr(given, name) for name in _OPTIONS}
        made = hyperparameters_of(state, total_steps, options)
        job = {**job_identity(spec), GROWTH: spec.scaling.growth}
        software = {name.lower(): version for name, version in signature.software}
        self._metadata = CommitMetadata(
            job=software.pop("code", ""),
            data=signature.data,
            versions=software | {"python": platform.python_version(), "kind": signature.kind},
            naming=naming_of(state.model, state.optimizer) | {"made": made, "job": job},
        )

    def has_pieces_among(self, members: tuple[WorkerId, ...]) -> None:
        """Records that a generation of these members begins, who have divided the pieces of a
        sharded optimizer's state among them. If it begins with the step of the last snapshot, all
        take that checkpoint again: members that have not taken it yet may hold no longer what those
        who are lost held with them."""
        self._holders = members
        taken = self._uploader.snapshot.step
        if self._due_from == taken + 1:
            self._due_from = taken

    def planned(self, step: int) -> bool:
        """Returns whether the job plans a checkpoint of `step`."""
        total_steps = self._session.total_steps
        return self._is_multiple(step) or (0 < total_steps <= step)

    def _is_multiple(self, step: int) -> bool:
        every = self._config.every_steps
        return every is not None and step % every == 0

    def raise_when_late(self) -> None:
        """Checkpoints of an interrupted run do not wait for a store that stays unavailable."""
        self._catalog.store.raise_when_late()

    # ------------------------------------------------ between a step's body and the next step

    def take_if_due(self, writers: Sequence[WorkerId] = ()) -> None:
        """Takes a checkpoint of the step that has ended, if one is due, or if the controller names
        the `writers` that share it. Returns when the state is copied."""
        if self._has_right_state() and self._session.state.record is not None:
            self._take_if_due(self._session.state.record, writers)
        self._needs_no_help()

    def _take_if_due(self, record: StepRecord, writers: Sequence[WorkerId]) -> None:
        session, control = self._session, self._session.control
        step = session.progress.position.step
        if not self._prepared:
            self._prepared = True
            self._prepare(session.state)
        is_last = bool(control.interrupted or session.progress.position.ended)  # none follows it
        wanted = record.kept or self._requested or self._is_multiple(step) or is_last
        is_due = step >= self._due_from and wanted
        if is_due or (writers and not (self.busy and self._due_from == step + 1)):
            session.reporter.report("keep")
            session.reporter.pass_point("keeping")
            # The members skip it while an upload of one of them is late, as its header said.
            skips = record.late and not (writers or is_last)
            members = tuple(writers) or session.weights.members
            must = bool(writers or is_last)
            taken = not skips and self._take(step, members, must=must, waits=is_last)
            # A later step may satisfy it; the controller itself requests it again.
            if not taken and is_due:
                self._requested = False
                control.request_checkpoint()
            session.weights.wanted = step  # other members may have taken it
        control.checkpoint_late = self._uploader.late

    def _has_right_state(self) -> bool:
        session = self._session
        has_state = session.progress.has_state and session.weights.mismatch is None
        return has_state and not session.loop.in_body

    def _prepare(self, state: TrainState) -> None:
        """Makes ready for the first snapshot, once the optimizer has its state. One of what is
        sharded over the processes of this worker is made on the host, and needs nothing."""
        if self._config.enabled and not state.in_parts:
            with contextlib.suppress(StateError):  # the snapshot itself raises it
                held = state.holders.to_write(self._worker, self._holders)
                self._uploader.prepare(_tree(state, WorkerProgress()), held)

    def _say_not_ready(self, step: int) -> None:
        before = self._uploader.snapshot.step
        self._link.say(
            f"{self._worker}: no checkpoint of step {step} yet: that of step {before} is "
            "still being written; training goes on"
            if before >= 0
            else f"{self._worker}: no checkpoint of step {step} yet: the memory for it is "
            "still being made ready; training goes on"
        )

    def _take(
        self, step: int, members: tuple[WorkerId, ...], *, must: bool, waits: bool = False
    ) -> bool:
        """Takes a snapshot and starts to write this member's share. Returns whether it did, and
        says why not. `waits`: for the last one's upload, however long it takes. Memory for a state
        that has grown is made ready first, unless it `must` be taken. Raises StateError if
        something in the state cannot be stored and the job takes checkpoints of its own. If only
        others requested the checkpoint, it is skipped, and the user gets a message."""
        was_late = self._uploader.late
        if not waits and not self._uploader.ready(must=must):
            if not was_late:
                self._say_not_ready(step)
            return False
        by_job = self._requested or self._config.enabled
        state, progress = self._session.state, self._session.progress
        self._due_from, self._requested = step + 1, False
        try:
            self._uploader.wait()
        except StorageError as error:  # that checkpoint is lost, and training continues
            self._link.say(f"{self._worker}: no checkpoint: {error}")
        tree = self._gathered_tree()
        try:
            taken = self._uploader.take(
                step,
                tree,
                state.holders.to_write(self._worker, self._holders),
                writer=self._worker,
                members=members,
                must=must,
                metadata=self._metadata,
                lineage_id=progress.lineage_id,
            )
        except StateError as error:
            if by_job:
                raise
            self._link.say(f"{self._worker}: no checkpoint of step {step}: {error}")
            return True
        if not taken:
            self._say_not_ready(step)
        return taken

    @property
    def busy(self) -> bool:
        """Whether this member is still writing its share of the newest checkpoint."""
        return self._uploader.busy

    def write(self, step: int, names: Sequence[str]) -> None:
        """Also writes the blobs with these names, in place of a member that is lost."""
        self._uploader.write(step, names)

    def take_without_controller(self) -> None:
        """Writes and commits a last checkpoint, and reports the outcome, when no controller has
        answered for long; unless the body is running. See checkpoint_without_controller.py."""
        from elastic_dp.train.checkpointing.checkpoint_without_controller import (
            commit_without_controller,
        )

        if self._has_right_state() and self._session.state.holders.has_all:
            step = self._session.progress.position.step
            said = commit_without_controller(
                self._catalog,
                step,
                partial(self._write_alone, step),
                worker=self._worker,
                token=self._lease_token,
                lease_s=self._lease_s,
            )
            self._link.say(f"{self._worker}: {said}")
        self._needs_no_help()

    def _write_alone(self, step: int) -> WrittenBlobs | None:
        self._take(step, (self._worker,), must=True, waits=True)
        return self._uploader.wait()

    def _gathered_tree(self) -> dict[str, Any]:
        """Returns the state. Other processes help to gather it (`FollowerCheckpoints`)."""
        state = self._session.state
        if state.in_parts:
            self._session.control.agreed(True)
        return _tree(state, self._session.progress)

    def _needs_no_help(self) -> None:
        if self._session.state.in_parts:
            self._session.control.agreed(False)

    def restore(
        self,
        group: ProcessGroup,
        enters: Callable[[str], None],
        share: Callable[[Any, int, Mapping[str, str]], Any] | None = None,
    ) -> tuple[int, dict[str, Any]]:
        """Loads the newest intact checkpoint, together with all members of `group`. Of a sharded
        optimizer's state each of them gets what it is to hold.

        Returns its step and its tree (`_tree`). `enters`: see `read_collectively`. `share` takes
        the tree, the step and `_places_here`, and returns what of the tree is for this process.
        Raises RunMismatch if the checkpoint is not of this job.
        """
        state, membership = self._session.state, self._session.membership
        assert membership is not None
        holders, among = state.holders, (len(membership.members), membership.topology)

        def damaged(error: CheckpointDamaged) -> None:
            self._link.say(f"{self._worker}: {error}; taking the one before it")

        from elastic_dp.train.checkpointing.collective_read import read_collectively

        read = read_collectively(
            self._catalog,
            group,
            enters=enters,
            damaged=damaged,
            needs_of=lambda manifest: holders.needs(manifest, *among),
        )
        commit = read.commit
        mine = self._metadata
        kind = group.gather_bytes(mine.versions["kind"].encode())[0].decode()
        others = (
            "Something else has written to the folder: begin the run in another one, or delete "
            "this checkpoint"
        )
        with taking_apart(commit.step, others):
            check_job(commit.metadata, mine.naming["job"], mine.data, commit.step)
            tree = read.tree(holders.common(commit.manifest))
            check_fits(tree, commit.metadata.naming, state)
            warnings = self._changes_since(commit, tree["step"], kind)
            places = _places_here(commit, state)
            if share is not None:
                tree = share(tree, commit.step, places)
            state.adopt(
                rehome_state(tree, self._session.device, state.own_tensors, places), body=True
            )
            holders.restore(read, places, membership.rank(self._worker), *among)
        if group.rank == 0:  # the others would report the same
            self._link.say(f"going on from step {commit.step}")
            for text in warnings:
                self._link.say(f"WARNING: {text}")
        self._due_from = commit.step + 1
        return commit.step, tree

    def _changes_since(self, commit: CommitRecord, saved: dict[str, Any], kind: str) -> list[str]:
        """Returns what a user should know of: another kind of machine, which is added to those of
        the saved step, and other settings than when the checkpoint was made."""
        changes, kinds = [], saved["kinds"]
        if kind not in kinds:
            kinds.append(kind)
            changes.append(
                f"goes on from step {commit.step} on {kind!r}, another kind of machine than "
                f"{kinds[-2]!r}"
            )
        then, now = commit.metadata.naming["made"], self._metadata.naming["made"]
        return changes + changes_since(then, now, commit.step)

    def close(self) -> None:
        """Waits until the upload under way has ended."""
        self._uploader.close()


def _tree(state: TrainState, progress: WorkerProgress) -> dict[str, Any]:
    """Returns the state without values that only some members may have computed."""
    tree = state.tree(progress.evaluations, None, whole=True)
    tree["log_calls"] = progress.log_calls_of_body()
    if state.record is not None:
        tree["step"]["record"] = vars(state.record) | {"grad_norm": None}
    return tree


def _places_here(commit: CommitRecord, state: TrainState) -> dict[str, str]:
    """Returns the type of the device on which each tensor belongs here, by the tensor's name. That
    is the type of the device that it was on, unless its parameter was on another type of device
    than here: then it goes where the parameter is. As in torch's `load_state_dict`, counts of steps
    stay on the host, unless the optimizer is fused or capturable."""
    found, moved = device_types(commit), dict[Any, str]()
    for n, p in enumerate(state.parameters.values()):
        kind = local_of(p).device.type
        if found.get(f"step.parameters.{n}", kind) != kind:
            moved[p] = found[f"step.previous.parameters.{n}"] = kind
    groups = [(p, group) for group in state.optimizer.param_groups for p in group["params"]]
    for name in found:
        if not name.startswith("step.optimizer."):
            continue
        _, _, number, key = name.split(".", 3)
        p, group = groups[int(number)]
        if p in moved:
            counts = key == "step" and not (group.get("fused") or group.get("capturable"))
            found[name] = "cpu" if counts else moved[p]
    return found


class FollowerCheckpoints:
    """In the place of `WorkerCheckpointer` in another process of a worker: takes part as often as
    the state is gathered, until the first process says that it has done."""

    def __init__(self, state: TrainState, control: WorkerControl, reporter: PhaseReporter) -> None:
        self._state, self._control, self._reporter = state, control, reporter

    def take_if_due(self, writers: Sequence[WorkerId] = ()) -> None:
        while self._control.agreed(False):
            self._reporter.pass_point("keeping")
            self._state.gather()

    take_without_controller = take_if_due
