"""The actors: a controller that leads one run, and workers as detached actors beside it.

Workers are never one placement group, which cannot be resized: each is an actor of its own that waits, as demand
the autoscaler sees, until it can be placed. They are detached, so they outlive their controller, named
run/identity, and never restarted by Ray: an identity is used once. Every name lives in the namespace "elastic_dp".

The controller is restarted by Ray. It then finds its workers by their names and leads on from what the GCS keeps.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import threading
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import cloudpickle
import ray
import ray._private.state

from elastic_dp.cluster import placing
from elastic_dp.cluster.actor_link import ActorLink
from elastic_dp.cluster.autoscaler import Autoscaler
from elastic_dp.cluster.controller import Controller
from elastic_dp.cluster.finding import NAMESPACE
from elastic_dp.cluster.heartbeats import Address
from elastic_dp.cluster.kept import KeptLedger, forget, job_of
from elastic_dp.cluster.logs import print_whatever_fits
from elastic_dp.cluster.notices import Notices
from elastic_dp.cluster.placement import Placement, can_hold
from elastic_dp.cluster.record import Outcome
from elastic_dp.cluster.worker import Job, Request, Worker, prepare_environment
from elastic_dp.coordinator.messages import (
    Cause,
    CheckpointRequested,
    DrainNoticed,
    Event,
    Explain,
    Home,
    ReleaseWorker,
    ReportYourself,
    SizeRequested,
    StopRequested,
    WorkerId,
    WorkerLost,
    WorkerPlaced,
)
from elastic_dp.distributed.process_group import Rendezvous
from elastic_dp.spec import DataConfig, JobSpec, ScalingConfig
from elastic_dp.telemetry.journal import Journal, Position
from elastic_dp.threads import background
from elastic_dp.train.controller_link import WrittenParts

_LOW_ON_MEMORY = "low on memory"  # in what Ray says of those whom its memory monitor killed
_KEPT_S = 600.0  # how long a controller stays for drivers after its run has ended
_PRINTED_S = 5.0  # how long workers may take to say what they printed
_PRINTED_BYTES = 1 << 20  # at most so much at a time, the newest
_LOOK_FOR_ROOM_S = 5.0  # how often it is checked that some node could hold a worker
_NO_ROOM_S = 30.0  # how long a worker waits before that is said: what seems taken may be its own, while its process starts


@ray.remote(max_restarts=0, concurrency_groups={"control": 2})  # type: ignore[call-overload]
class WorkerActor:
    """One worker. `run` occupies the default group for the worker's life; `deliver` gets in beside it."""

    def __init__(self, identity: WorkerId, job: Job, controller: Any, term: int) -> None:
        print_whatever_fits()
        self._link = ActorLink(controller, term)
        self._worker = Worker(identity, job, self._link, ray.util.get_node_ip_address())
        self._placed = WorkerPlaced(identity, _home())
        self._link.post(self._placed)

    def run(self) -> None:
        """Each controller calls it, to see the end of this worker; it runs for the first."""
        self._worker.run()
        ray.actor.exit_actor()

    @ray.method(concurrency_group="control")
    def serve(self, term: int, controller: Address, logged_to: tuple[int, int]) -> None:
        """A controller has taken over; heartbeats go to it from now on."""
        self._worker.hear_from(controller)
        self._link.serve(term, logged_to)

    @ray.method(concurrency_group="control")
    def deliver(self, command: Request, rendezvous: Rendezvous | None) -> None:
        if isinstance(command, ReportYourself):
            self._link.post(self._placed)
        self._worker.deliver(command, rendezvous)

    @ray.method(concurrency_group="control")
    def pid(self) -> int:
        return os.getpid()

    @ray.method(concurrency_group="control")
    def printed(self, after: Mapping[str, int]) -> dict[str, tuple[int, str]]:
        """What came to standard output and error after these bytes, and where they end; whole lines only."""
        own = ray._private.worker.global_worker
        paths = {"out": own.get_out_file_path(), "err": own.get_err_file_path()}
        return {name: _lines(path, after.get(name, 0)) for name, path in paths.items()}


def _home() -> Home:
    context = ray.get_runtime_context()
    return Home(context.get_node_id(), context.get_node_labels().get(placing.MARKET) == "spot")


class RayFleet:
    """Implements `Fleet` with detached actors."""

    def __init__(self, job: Job, spec: JobSpec, controller: Controller, handle: Any) -> None:
        self._job, self._stored = job, ray.put(job)
        self._spec, self._controller, self._handle = spec, controller, handle
        self._term = controller.ledger.facts.term
        self._actors: dict[WorkerId, Any] = {}
        self._told_to_go: set[WorkerId] = set()
        self._withdrawn: set[WorkerId] = set()
        self.placement = Placement(spec.scaling.resources_per_worker, controller.say)
        self._asked: dict[WorkerId, placing.Labels] = {}  # of which market and zone
        self._nodes: dict[WorkerId, str] = {}  # as far as it was asked
        self._lock = threading.Lock()

    def start(self, worker: WorkerId) -> None:
        resources = dict(self._spec.scaling.resources_per_worker)
        asked = placing.wishes(self._spec.scaling, self._asked.values())
        environment: dict[str, str] = {}
        prepare_environment(environment, self._spec.scaling.num_threads)
        actor = WorkerActor.options(  # type: ignore[attr-defined]
            name=f"{self._job.run}/{worker}",
            namespace=NAMESPACE,
            lifetime="detached",
            num_cpus=resources.pop("CPU", 0),
            num_gpus=resources.pop("GPU", 0),
            memory=resources.pop("memory", None),
            resources=resources or None,
            runtime_env={"env_vars": environment},
            **placing.options(self.placement.without_avoided(worker, asked)),
        ).remote(worker, self._stored, self._handle, self._term)
        self._asked[worker] = asked[0] if asked else {}
        self._watch(worker, actor)

    def adopt(self, logged_to: tuple[int, int]) -> list[WorkerId]:
        """The workers that earlier controllers started and that are up; those that wait for a place are not needed."""
        for worker, actor, _ in self._named("PENDING_CREATION", "DEPENDENCIES_UNREADY"):
            self._controller.ledger.note(ReleaseWorker(worker, "was still pending"))
            ray.kill(actor, no_restart=True)
        found = self._named("ALIVE")
        labels = {node["NodeID"]: node["Labels"] for node in ray.nodes()}
        for worker, actor, node in found:
            self._asked[worker] = placing.had(labels.get(node, {}))
            actor.serve.remote(self._term, self._job.controller, logged_to)
            self._watch(worker, actor)
        return [worker for worker, _, _ in found]

    def _named(self, *states: str) -> list[tuple[WorkerId, Any, str]]:
        """The workers of this run that the GCS has in one of these states, and the node of each."""
        prefix, named = f"{self._job.run}/", []
        for entry in chain(
            *(ray._private.state.actors(actor_state_name=s).values() for s in states)
        ):
            if entry["Name"].startswith(prefix):
                with contextlib.suppress(ValueError):  # it died since
                    actor = ray.get_actor(entry["Name"], namespace=NAMESPACE)
                    node = entry["Address"]["NodeID"]
                    named.append((entry["Name"].removeprefix(prefix), actor, node))
        return named

    def send(self, worker: WorkerId, command: Request, rendezvous: Rendezvous | None) -> None:
        if isinstance(command, ReleaseWorker):
            self._told_to_go.add(worker)
        actor = self._actors.get(worker)
        if actor is not None:
            with contextlib.suppress(ray.exceptions.RayError):
                actor.deliver.remote(command, rendezvous)

    def kill(self, worker: WorkerId) -> None:
        actor = self._actors.get(worker)
        if actor is not None:
            _kill(actor)

    def withdraw_in_vain(self) -> None:
        """Those that wait because of a node that would do now; others are asked for in their place."""
        for worker in self.placement.in_vain(self.nodes(), self.actors()):
            self._controller.withdrawn(worker)
            self._withdrawn.add(worker)
            self.kill(worker)

    def close(self) -> None:
        for worker in list(self._actors):
            self._told_to_go.add(worker)
            self.kill(worker)

    def actors(self) -> dict[WorkerId, Any]:
        return dict(self._actors)

    def _watch(self, worker: WorkerId, actor: Any) -> None:
        with self._lock:
            self._actors[worker] = actor
        actor.run.remote().future().add_done_callback(lambda f: self._ended(worker, actor, f))

    def nodes(self) -> dict[WorkerId, str]:
        """The node of each worker that was placed. An actor that is never restarted stays there: it is asked once."""
        actors = self.actors()
        known = {worker: node for worker, node in self._nodes.items() if worker in actors}
        for worker in actors.keys() - known.keys():
            actor = ray._private.state.state.actor_table(actors[worker]._actor_id.hex())
            if actor and actor["State"] == "ALIVE":
                known[worker] = actor["Address"]["NodeID"]
        self._nodes = known
        return known

    def without_process(self, workers: Iterable[WorkerId]) -> list[WorkerId]:
        """Those of them for whom Ray has none yet: they wait for a place, or for their process to start there."""
        actors = self.actors()
        tables = {
            worker: ray._private.state.state.actor_table(actors[worker]._actor_id.hex())
            for worker in workers
            if worker in actors
        }
        return [worker for worker, table in tables.items() if not (table and table["Pid"])]

    def _ended(self, worker: WorkerId, actor: Any, future: Any) -> None:
        error = future.exception()
        with self._lock:
            self._actors.pop(worker, None)
            self._asked.pop(worker, None)
        if isinstance(error, ray.exceptions.RayTaskError):
            # It raised, and holds its node's GPU until it is killed: not here, in Ray's own thread, where that never returns.
            background("kill", partial(_kill, actor)).start()
        reason, cause = _death(error)
        if worker in self._withdrawn:
            reason, cause = "waited for a node, and is asked for anew", Cause.PREEMPTED
        try:
            if worker not in self._told_to_go and cause is not Cause.PREEMPTED:
                self.placement.failed(actor._actor_id.hex())  # before another is asked for
        finally:  # the GCS may be away
            self._controller.post(WorkerLost(worker, reason, cause))


def _kill(actor: Any) -> None:
    with contextlib.suppress(ray.exceptions.RayError):
        ray.kill(actor, no_restart=True)


def _death(error: BaseException | None) -> tuple[str, Cause]:
    """Why an actor is no more, as Ray tells it."""
    if error is None:
        return "left", Cause.UNKNOWN
    if isinstance(error, ray.exceptions.RayTaskError):  # its text begins with Ray's own frames
        return f"{type(error.cause).__name__}: {error.cause}"[:600], Cause.UNKNOWN
    text = str(error).strip()
    reason = text.splitlines()[0][:300]
    if getattr(error, "preempted", False):
        return f"its node was preempted: {reason}", Cause.PREEMPTED
    if isinstance(error, ray.exceptions.OutOfMemoryError) or _LOW_ON_MEMORY in text:
        return f"Ray killed it, since its node ran low on memory: {reason}", Cause.OUT_OF_MEMORY
    return reason, Cause.UNKNOWN


# One thread for events: what a worker says is taken in the order in which it said it.
@ray.remote(  # type: ignore[call-overload]
    num_cpus=0, max_restarts=-1, concurrency_groups={"events": 1, "follow": 16}
)
class ControllerActor:
    """Leads one run until it has ended, and a while later goes, unless a driver that took the result kills it.

    Its name is the run's: two drivers cannot lead one run. All that it is given is the run, since Ray gives the same to
    whoever is started in its place; the rest is in the GCS.
    """

    def __init__(self, run: str) -> None:
        pickled, index, secret, url, faults, record = job_of(run)
        self._run, self._url = run, url
        self._spec: JobSpec = cloudpickle.loads(pickled)[0]
        self._ledger = ledger = KeptLedger(run)
        host = ray.util.get_node_ip_address()
        since = ledger.facts.started_at if ledger.inherited else None
        self._journal = Journal(url, since=since)
        self._controller = Controller(self._spec, run, host, secret, self._journal, ledger, url)
        if not ledger.inherited:  # else it was compared when the run began
            self._controller.check = partial(record.check_or_write, url, None)
        address, lease_token = self._controller.heartbeats.address, ledger.facts.lease_token
        job = Job(pickled, index, run, url, address, secret, lease_token, faults)
        self._handle = ray.get_runtime_context().current_actor
        self._fleet = RayFleet(job, self._spec, self._controller, self._handle)
        self._notices = Notices(
            ray._private.state.state.get_draining_nodes, self._fleet.nodes, self._controller.post
        )
        self._waits_for, self._waiting = "", dict[WorkerId, float]()
        self._controller.open(self._fleet)
        # What torch, ray and the job's imports made is here to stay. Where each full collection walks through it, it
        # takes 0.1 s longer; so it walks through what came later, which grows with the workers alone.
        gc.collect()
        gc.freeze()
        background("controller", self._lead, self._controller.broke).start()
        background("room", self._look_for_room).start()
        self._notices.start()

    @ray.method(concurrency_group="events")
    def about(self) -> tuple[JobSpec, str, bool]:
        """The spec without what is the user's own, which a driver may have no code for; the folder; whether it has
        ended."""
        data = self._spec.data
        bare = DataConfig("-", micro_batch_size=data.micro_batch_size, seed=data.seed)
        if data.epochs is not None:
            bare = dataclasses.replace(bare, epochs=data.epochs)
        spec = dataclasses.replace(self._spec, config={}, data=bare)
        return spec, self._url, self._controller.ended.is_set()

    @ray.method(concurrency_group="events")
    def post(self, event: Event) -> None:
        self._controller.post(event)

    @ray.method(concurrency_group="events")
    def log(self, term: int, step: int, call: int, metrics: Mapping[str, Any]) -> None:
        if term == self._ledger.facts.term:  # else it is sent again, in order
            self._controller.log(step, call, metrics)

    @ray.method(concurrency_group="events")
    def say(self, text: str) -> None:
        self._controller.say(text)

    @ray.method(concurrency_group="events")
    def wrote(self, worker: WorkerId, written: WrittenParts) -> None:
        self._controller.wrote(worker, written)

    @ray.method(concurrency_group="events")
    def checkpoint(self) -> None:
        self._request(CheckpointRequested())

    @ray.method(concurrency_group="events")
    def skip(self, row_groups: Sequence[str]) -> None:
        self._controller.skip(row_groups)

    @ray.method(concurrency_group="events")
    def status(self) -> dict[str, Any]:
        own = {"waits_for": self._waits_for, "avoided_nodes": self._fleet.placement.avoided}
        return self._controller.status() | own | {"labels": dict(self._spec.labels)}

    @ray.method(concurrency_group="events")
    def scale(self, size: int, min_workers: int | None = None) -> None:
        self._request(SizeRequested(size, min_workers))

    @ray.method(concurrency_group="events")
    def stop(self, reason: str) -> None:
        self._request(StopRequested(reason))

    @ray.method(concurrency_group="events")
    def drain(self, worker: WorkerId, within_s: float | None) -> list[WorkerId]:
        """Returns the workers there are; another one cannot be drained."""
        deadline = None if within_s is None else time.monotonic() + within_s
        present = self._controller.status()["workers"]
        workers = [*(present | self._ledger.facts.here)]  # who takes over has not met them yet
        if worker in workers:
            self._request(DrainNoticed(worker, deadline))
        return workers

    @ray.method(concurrency_group="follow")
    def follow(
        self, position: Position | None, timeout_s: float
    ) -> tuple[Position, list[dict[str, Any]]]:
        return self._journal.since(position, timeout_s)

    @ray.method(concurrency_group="follow")
    def wait(self, timeout_s: float | None) -> Outcome | None:
        """How the run ended, or None while it goes on."""
        return self._controller.outcome if self._controller.ended.wait(timeout_s) else None

    @ray.method(concurrency_group="follow")
    def forget(self) -> None:
        """The result is taken: whoever says so ends this actor."""
        forget(self._run)

    @ray.method(concurrency_group="follow")
    def pids(self) -> dict[WorkerId, int]:
        """The process of each worker that is up."""
        found = {}
        for worker, actor in self._fleet.actors().items():
            with contextlib.suppress(ray.exceptions.RayError):
                found[worker] = ray.get(actor.pid.remote(), timeout=1.0)
        return found

    @ray.method(concurrency_group="follow")
    def printed(
        self, after: Mapping[WorkerId, Mapping[str, int]]
    ) -> dict[WorkerId, dict[str, tuple[int, str]]]:
        """Of each worker that is up, what it printed since then."""
        actors = self._fleet.actors()
        asked = {worker: a.printed.remote(after.get(worker, {})) for worker, a in actors.items()}
        ray.wait([*asked.values()], num_returns=len(asked), timeout=_PRINTED_S)
        found = {}
        for worker, answer in asked.items():
            with contextlib.suppress(ray.exceptions.RayError):
                found[worker] = ray.get(answer, timeout=0)
        return found

    def _request(self, event: Event) -> None:
        """An operator's; it outlives this process."""
        self._ledger.note(event)
        self._ledger.keep()
        self._controller.post(event)

    def _lead(self) -> None:
        self._controller.lead(self._found())
        if self._controller.superseded:
            os._exit(1)  # the run's workers, lease, record and name are another's
        self._notices.close()
        time.sleep(_KEPT_S)
        forget(self._run)
        ray.kill(self._handle)

    def _found(self) -> Sequence[WorkerId]:
        if not self._ledger.inherited:
            return ()
        try:
            return self._fleet.adopt(self._controller.logged_to)
        except Exception:  # the GCS may be away; who answers and leads nobody is worse than none
            traceback.print_exc()
            os._exit(1)  # Ray starts it again

    def _look_for_room(self) -> None:
        """Say why workers wait for a node, once for each reason, and in the status as long as they do."""
        said = {""}
        autoscaler = Autoscaler(self._spec.scaling.resources_per_worker)
        while not self._controller.ended.wait(_LOOK_FOR_ROOM_S):
            with contextlib.suppress(Exception):  # whatever Ray raises for a head that is away
                self._fleet.withdraw_in_vain()
                self._waits_for = self._why_waiting(autoscaler)
            if self._waits_for not in said:
                self._journal.command(Explain(self._waits_for))
                said.add(self._waits_for)

    def _why_waiting(self, autoscaler: Autoscaler) -> str:
        stages = self._controller.status()["workers"]
        starting = {worker for worker, stage in stages.items() if stage == "starting"}
        waiting = starting - self._fleet.nodes().keys()
        if not waiting:
            self._waiting = {}
            return ""
        now = time.monotonic()
        without = self._fleet.without_process(waiting)
        self._waiting = {worker: self._waiting.get(worker, now) for worker in without}
        waited = any(now - since >= _NO_ROOM_S for since in self._waiting.values())
        reasons = no_room(self._spec.scaling, ray.nodes()), autoscaler.why(time.time())
        said = ". ".join(reason for reason in reasons if reason)
        if not said and waited and not has_room(self._spec.scaling.resources_per_worker):
            return "no node has room for another worker now: what could hold one is taken. Waiting for room"
        return said


def _lines(path: str, after: int) -> tuple[int, str]:
    with open(path, "rb") as file:
        end = file.seek(0, os.SEEK_END)
        start = file.seek(max(after, end - _PRINTED_BYTES))
        whole, _, _ = file.read(end - start).rpartition(b"\n")
    return start + len(whole) + bool(whole), whole.decode(errors="replace")


def has_room(needs: Mapping[str, float]) -> bool:
    """Whether a node has so much that nobody uses."""
    free = ray._private.state.available_resources_per_node().values()
    return any(can_hold(needs, {"Resources": resources}) for resources in free)


def no_room(scaling: ScalingConfig, nodes: Sequence[Mapping[str, Any]]) -> str:
    """Why no node could ever hold a worker of one of the kinds that are asked for, however idle; empty when one could."""
    alive, needs = [node for node in nodes if node["Alive"]], scaling.resources_per_worker
    totals = [node["Resources"] for node in alive]
    if large := [node["Labels"] for node in alive if can_hold(needs, node)]:
        firm = [{placing.MARKET: "on-demand"}] * scaling.min_on_demand
        # What those before it were asked for: the first worker, and the first that need not be firm.
        for others in [[], firm] if scaling.max_workers > scaling.min_on_demand else [[]]:
            if why := placing.missing(placing.wishes(scaling, others), large):
                return f"{why} and large enough, as ScalingConfig asks. Waiting for such a node"
        return ""
    largest = {name: max((has.get(name, 0) for has in totals), default=0) for name in needs}
    return (
        f"no node of this cluster can hold a worker: it needs {dict(needs)}, and the most that any node has is "
        f"{largest}. Waiting for such a node; lower ScalingConfig.resources_per_worker if none will come"
    )
