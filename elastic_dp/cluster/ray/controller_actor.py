"""The actor that leads one run. Ray restarts it; it then finds its workers by name and continues
from the state in the GCS.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib
import os
import time
import traceback
from collections.abc import Sequence
from functools import partial
from typing import Any

import cloudpickle
import ray

from elastic_dp.cluster.controller.controller import Controller
from elastic_dp.cluster.metrics_exporter import export_metrics
from elastic_dp.cluster.outage_notice import OutageNotice
from elastic_dp.cluster.ray import private
from elastic_dp.cluster.ray.capacity_monitor import CapacityMonitor
from elastic_dp.cluster.ray.drain_watcher import DrainWatcher
from elastic_dp.cluster.ray.ray_worker_group import RayWorkerGroup
from elastic_dp.cluster.runs.attach import address
from elastic_dp.cluster.runs.controller_state import RunTotals
from elastic_dp.cluster.runs.ray_kv_state import RayKvStateStore, forget, load_job
from elastic_dp.cluster.worker import WorkerJob
from elastic_dp.config import DataConfig, JobSpec
from elastic_dp.coordinator import messages as m
from elastic_dp.coordinator.messages import WorkerId
from elastic_dp.errors import StorageError
from elastic_dp.run_record import RunOutcome
from elastic_dp.storage import Store
from elastic_dp.telemetry.journal import Journal, JournalPosition
from elastic_dp.telemetry.journal_reader import JournalTail
from elastic_dp.threads import background
from elastic_dp.train.log_sender import LoggedCall

_SHARING = "elastic_dp.extensions.sharing.cluster_sharing"
_KEPT_S = 600.0  # how long a controller stays for drivers after its run has ended


# One thread for events: the messages of a worker are handled in the order in which it sent them.
@ray.remote(  # type: ignore[call-overload]
    num_cpus=0, max_restarts=-1, concurrency_groups={"events": 1, "follow": 16}
)
class ControllerActor:
    """Leads one run until it has ended. The actor ends some minutes later, or when a driver has
    taken the result.

    It is named after the run, so two drivers cannot lead one run. Its only argument is the run,
    because Ray passes the same arguments to its replacement; everything else is in the GCS.
    """

    def __init__(self, run: str) -> None:
        job = load_job(run)
        self._run, self._url = run, job.url
        self._spec: JobSpec = cloudpickle.loads(job.pickled)[0]
        self._state_store = state_store = RayKvStateStore(run)
        host = ray.util.get_node_ip_address()
        since = state_store.state.started_at if state_store.inherited else None
        if not state_store.inherited:
            with contextlib.suppress(StorageError, OSError):  # then the result counts this start
                events = JournalTail(Store(job.url)).lines_of("events")
                state_store.state.earlier = RunTotals.of(events)
        self._journal = Journal(job.url, since=since)

        def check() -> None:
            if not state_store.inherited:  # the run begins
                job.record.check_or_write(job.url, None)
                dataclasses.replace(job.start, ray=address()).write(Store(job.url))

        self._controller = Controller(
            self._spec,
            self._journal,
            host=host,
            secret=job.secret,
            state_store=state_store,
            url=job.url,
            check=check,
        )
        worker_job = WorkerJob(
            pickled=job.pickled,
            index=job.index,
            run=run,
            url=job.url,
            controller=self._controller.heartbeats.address,
            secret=job.secret,
            lease_token=state_store.state.lease_token,
            faults=job.faults,
            processes=self._spec.scaling.processes_per_worker,
            nodes=self._spec.scaling.nodes_per_worker,
        )
        self._handle = ray.get_runtime_context().current_actor
        self._worker_group = RayWorkerGroup(worker_job, self._spec, self._controller, self._handle)
        drain_watcher = DrainWatcher(
            private.draining_nodes,
            self._worker_group.all_nodes,
            private.head_node,
            self._controller.post,
            self._controller.say,
        )
        self._capacity_monitor = CapacityMonitor(
            self._spec.scaling,
            self._worker_group,
            lambda: self._controller.status()["workers"],
            self._controller.say,
        )
        self._sharing = importlib.import_module(_SHARING).ClusterSharing(
            self._spec.name,
            self._spec.scaling,
            began_at=state_store.state.started_at,
            sizes=self._controller.requested_sizes,
            held=self._worker_group.held_nodes,
            post=self._controller.post,
            say=self._controller.say,
        )
        self._controller.open(self._worker_group)
        # What torch, ray and the job's imports have allocated stays. A full collection that visits
        # it takes 0.1 s longer, so it is frozen; what comes later grows with the workers alone.
        gc.collect()
        gc.freeze()
        background("controller", self._lead, self._controller.broke).start()
        self._capacity_monitor.start(self._controller.ended)
        drain_watcher.start(self._controller.ended)
        background("metrics", partial(export_metrics, self._controller, self._spec.name)).start()

    @ray.method(concurrency_group="events")
    def about(self) -> tuple[JobSpec, str, bool]:
        """Return the spec without the user's own objects, whose code a driver may not have, the
        run's folder, and whether the run has ended.
        """
        data = self._spec.data
        bare = DataConfig("-", micro_batch_size=data.micro_batch_size, seed=data.seed)
        if data.epochs is not None:
            bare = dataclasses.replace(bare, epochs=data.epochs)
        spec = dataclasses.replace(self._spec, config={}, data=bare)
        return spec, self._url, self._controller.ended.is_set()

    @ray.method(concurrency_group="events")
    def tell(self, method: str, *content: Any) -> None:
        """Take a message of a worker (`MessageLink`), or a text of the driver."""
        getattr(self._controller, method)(*content)

    @ray.method(concurrency_group="events")
    def log_all(self, term: int, calls: Sequence[LoggedCall], sent_at: float) -> None:
        if term != self._state_store.state.term:
            return  # it is sent again, in order
        if not self._controller.log_all(calls, sent_at):
            self._worker_group.ask_for_metrics(self._controller.metrics.logged_to)

    @ray.method(concurrency_group="events")
    def status(self) -> dict[str, Any]:
        own = {
            "waits_for": self._capacity_monitor.waits_for,
            "avoided_nodes": self._worker_group.node_avoidance.avoided,
            "goodput": self._controller.times.goodput().fraction,
        }
        status = self._controller.status() | own
        if queued := self._sharing.queued_because:
            status |= {"phase": "queued", "reason": queued}
        return status

    @ray.method(concurrency_group="events")
    def request(self, event: m.SizeRequested | m.StopRequested | m.CheckpointRequested) -> None:
        """Accept an operator's request."""
        self._request(event)

    @ray.method(concurrency_group="events")
    def drain(self, worker: WorkerId, within_s: float | None) -> list[WorkerId]:
        """Drain a worker. Returns the workers that can be drained."""
        deadline = None if within_s is None else time.monotonic() + within_s
        present = self._controller.status()["workers"]
        # A controller that takes over knows them only from the stored state.
        workers = [*(present | self._state_store.state.here)]
        if worker in workers:
            self._request(m.DrainNoticed(worker, deadline))
        return workers

    @ray.method(concurrency_group="follow")
    def follow(
        self, position: JournalPosition | None, timeout_s: float
    ) -> tuple[JournalPosition, list[dict[str, Any]]]:
        return self._journal.since(position, timeout_s)

    @ray.method(concurrency_group="follow")
    def wait(self, timeout_s: float | None) -> RunOutcome | None:
        """Return how the run ended, or None while it continues."""
        return self._controller.outcome if self._controller.ended.wait(timeout_s) else None

    @ray.method(concurrency_group="follow")
    def forget(self) -> None:
        """Delete the run's state: a driver has taken the result, and ends this actor next."""
        forget(self._run)

    @ray.method(concurrency_group="follow")
    def processes(self) -> dict[WorkerId, tuple[int, str]]:
        """Return the process id of each running worker, and the IP address of its node."""
        return self._processes()

    @ray.method(concurrency_group="follow")
    def kill(self, worker: WorkerId) -> list[WorkerId]:
        """Kill a worker's process. Returns the workers that have one."""
        present = [*self._processes()]
        if worker in present:
            self._worker_group.kill(worker)
        return present

    def _processes(self) -> dict[WorkerId, tuple[int, str]]:
        actors = self._worker_group.actors()
        entries = {worker: private.actor(actor) for worker, actor in actors.items()}
        return {
            worker: (entry.pid, entry.address)
            for worker, entry in entries.items()
            if entry is not None and entry.state == "ALIVE"
        }

    def _request(self, event: m.Event) -> None:
        """Accept an operator's request; it is stored before it is acknowledged."""
        self._state_store.record(event)
        self._state_store.save()
        self._controller.post(event)

    def _lead(self) -> None:
        state = self._state_store.state
        if not (state.here or state.stepped or state.outcome):
            self._sharing.admit(lambda: state.stop is not None)
            self._state_store.change(started_at=time.time())  # its time counts from now
            notice = OutageNotice("storing the run in the cluster", self._controller.say)
            notice.insist(self._state_store.save)
        self._sharing.start(self._controller.ended)
        self._controller.lead(self._found())
        if self._controller.superseded:
            os._exit(1)  # the run's workers, lease, record and name belong to another controller
        time.sleep(_KEPT_S)
        forget(self._run)
        ray.kill(self._handle)

    def _found(self) -> Sequence[WorkerId]:
        if not self._state_store.inherited:
            return ()
        try:
            return self._worker_group.adopt(self._controller.metrics.logged_to)
        except Exception:
            # The GCS may be unavailable. A controller that leads no worker is worse than none.
            traceback.print_exc()
            os._exit(1)  # Ray starts it again
