"""Commits and finds the checkpoints of a run for its controller, on the committer's thread.

A run without a folder has none: nothing is committed, and none is found.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from elastic_dp.checkpoint.catalog import Catalog
from elastic_dp.cluster.controller.metric_log import MetricLog
from elastic_dp.cluster.runs.controller_state import ControllerStateStore
from elastic_dp.cluster.worker import WriteBlobs
from elastic_dp.cluster.worker_group import WorkerGroup
from elastic_dp.config import JobSpec
from elastic_dp.coordinator.messages import (
    CheckpointCommitted,
    CheckpointFound,
    CheckpointRequested,
    Event,
    WorkerId,
)
from elastic_dp.storage import Store
from elastic_dp.train.checkpointing.checkpoint_committer import (
    CheckpointCommitter,
    CommitterActions,
)
from elastic_dp.train.controller_link import WrittenBlobs


class ControllerCheckpointer:
    """The controller's side of checkpoints.

    `post` puts events into the controller's inbox, `say` writes to the journal, `fail` ends the
    run, `stand_down` stops leading because another cluster has the run. `check` raises if the
    folder belongs to another job; it is called under the run's lease before training starts.
    """

    def __init__(
        self,
        spec: JobSpec,
        url: str | None,
        *,
        post: Callable[[Event], None],
        say: Callable[[str], None],
        fail: Callable[[Exception], None],
        stand_down: Callable[[str], None],
        check: Callable[[], None] | None,
    ) -> None:
        self._spec, self._url = spec, url
        self._post, self._say = post, say
        self._fail, self._stand_down, self._check = fail, stand_down, check
        self._committer: CheckpointCommitter | None = None
        self._store: Store | None = None

    @property
    def store_retries(self) -> int:
        return 0 if self._store is None else self._store.counts.retries

    def open(
        self, worker_group: WorkerGroup, state_store: ControllerStateStore, metrics: MetricLog
    ) -> None:
        if self._url is None:
            return
        self._committer = committer = self._open_committer(self._url, worker_group, state_store)
        if state_store.inherited:  # claim the right to commit before members report parts
            if state_store.state.at_most is not None:
                committer.reject(state_store.state.at_most, state_store.highest_claimed())
            committer.take_over()
            if state_store.state.stepped:
                committer.training_began()
            for step, logged in metrics.recorded():
                committer.log(step, logged)

    def training_began(self) -> None:
        if self._committer is not None:
            self._committer.training_began()

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Record metrics for the checkpoint of this step. A repeated step makes a new
        checkpoint.
        """
        if self._committer is not None:
            self._committer.log(step, metrics)

    def wrote(self, worker: WorkerId, written: WrittenBlobs) -> None:
        if self._committer is not None:
            self._committer.wrote(worker, written)

    def lost(self, worker: WorkerId) -> None:
        if self._committer is not None:
            self._committer.lost(worker)

    def find(self, at_most: int | None, generation: int) -> None:
        """Post the newest checkpoint of step `at_most` or earlier; later ones are rejected from now
        on.
        """
        if self._committer is None:
            self._post(CheckpointFound(None))
            return
        if at_most is not None:
            self._committer.reject(at_most, generation)
        self._committer.find(lambda step: self._post(CheckpointFound(step)))

    def raise_when_late(self) -> None:
        """Checkpoints of an interrupted run do not wait for a store that stays unavailable."""
        if self._store is not None:
            self._store.raise_when_late()

    def close(self) -> None:
        if self._committer is not None:
            self._committer.close()

    def _open_committer(
        self, url: str, worker_group: WorkerGroup, state_store: ControllerStateStore
    ) -> CheckpointCommitter:
        failure = self._spec.failure
        self._store = store = Store(url, timeout_s=failure.storage_timeout_s, on_wait=self._say)
        return CheckpointCommitter(
            Catalog(store),
            self._spec.checkpoint,
            CommitterActions(
                request_blobs=lambda one: worker_group.send(
                    [one.worker],
                    WriteBlobs(one.worker, one.step, tuple(one.names)),
                ),
                request_checkpoint=partial(self._post, CheckpointRequested()),
                tell=self._say,
                committed=lambda step, duration_s: self._post(
                    CheckpointCommitted(step, round(duration_s, 3))
                ),
                stand_down=self._stand_down,
                fail=self._fail,
                check=self._check or (lambda: None),
            ),
            lease_s=failure.run_lease_s,
            token=state_store.state.lease_token,
        )
