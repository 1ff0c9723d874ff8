"""Attaches to a run that is live on the cluster, to one that has ended, or to one that is started.

Starting a controller imports torch, so that import is in the function: the command line attaches
without it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import ray
from ray.util import list_named_actors

from elastic_dp.cluster.console import warn_at_call
from elastic_dp.cluster.ray import cluster_connection, worker_placement
from elastic_dp.cluster.run_handle import Run, ask
from elastic_dp.cluster.runs.ray_kv_state import StoredJob, forget, has_owner, store_job
from elastic_dp.cluster.runs.run_history import address_of
from elastic_dp.config import DataConfig, JobSpec
from elastic_dp.errors import ClusterError, TrainError
from elastic_dp.run_record import RunLimits, read_result, run_url
from elastic_dp.storage import StorageURL, redact_url
from elastic_dp.wording import did_you_mean

NAMESPACE = "elastic_dp"  # the Ray namespace of all actors of this package
PATIENCE_S = 60.0  # for a controller that restarts, before anything is known of its run
CONTROLLER = "/controller"  # follows the run's name in the name of its controller's actor
_ANSWER_S = 10.0  # for a controller's status


def attach(
    name: str,
    storage_path: str | os.PathLike[str] | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Run:
    """The run of that name: the live one on this cluster, or one that has ended at `storage_path`.

    `storage_options`: of the storage path, as for `ElasticTrainer`. Raises ClusterError where there
    is neither, StorageError where the storage path cannot be read.
    """
    url = None if storage_path is None else run_url(name, storage_path, storage_options)
    try:
        return find_live(name, url)
    except ClusterError as error:  # no cluster has it: only what is stored
        if url is None:
            raise
        stored = read_result(url)
        if stored is None:
            raise ClusterError(f"{error}; and {url} has no result") from error
    spec = JobSpec(name=name, data=DataConfig("-", micro_batch_size=1), max_steps=1)
    return Run(spec, url, stored=stored)


class SeveralRuns(ClusterError):
    """Several clusters have a live run of the name. Example: one job on two Rays of a machine."""


def find_live(name: str, url: str | None = None, address: str | None = None) -> Run:
    """Return the live run of that name and, with `url`, of that folder; this process is then
    connected to its cluster.

    A process that is connected asks its own cluster. Otherwise the cluster that the run's last
    start has noted in its folder is asked first, if it is one of this user on this machine; then
    the one at `address` or RAY_ADDRESS or, without either, all of this user on this machine. Raises
    ClusterError if none has the run, SeveralRuns if several do and `url` does not say which.
    """
    if ray.is_initialized():
        return attach_live(name, url) or _missing(name, "this cluster", names())
    # A token is sent to whom this process connects, so only to this user's clusters unasked.
    ours = cluster_connection.clusters_of_this_user()
    address = address or os.environ.get("RAY_ADDRESS")
    asked: list[str | None] = [address] if address else [*ours] or [None]
    noted = None if url is None else address_of(url)
    if noted in ours:
        asked.sort(key=noted.__ne__)  # it goes first
        asked = asked if noted in asked else [noted, *asked]
    found: dict[str, LiveController] = {}
    others: set[str] = set()
    for one in asked:
        if len(asked) == 1 or one == address:
            cluster_connection.connect(one)
        elif one is None or not cluster_connection.connects(one):
            continue  # it is ending
        if url is not None or len(asked) == 1:
            if (run := attach_live(name, url)) is not None:
                return run
        elif (live := find(name)) is not None:
            found[str(one)] = live
        others |= {*names()}
        if len(asked) > 1:
            ray.shutdown()
    training = {one: live for one, live in found.items() if not live.ended}
    found = training or found
    if len(found) > 1:
        where = ", ".join(f"{one} ({redact_url(live.url)})" for one, live in found.items())
        raise SeveralRuns(
            f"{len(found)} Ray clusters of this user on this machine have a run named {name!r}: "
            f"choose one by --address or --storage-path: {where}"
        )
    for one in found:
        cluster_connection.connect(one)
        if (run := attach_live(name)) is not None:
            return run
    _missing(name, " or ".join(filter(None, asked)) or "this cluster", sorted(others))


def _missing(name: str, asked: str, live: list[str]) -> NoReturn:
    raise ClusterError(
        f"no run named {name!r} is live on {asked}, which has: {', '.join(live) or 'none'}. One "
        f"that ended is found by its storage_path{did_you_mean(name, live)}"
    )


def check_may_steer(run: Run, storage_path: str | None) -> None:
    """Raise ClusterError for the run of somebody else: one on the Ray of another user of this
    machine, unless its folder is this user's or, in a remote store, was named.
    """
    owner = cluster_connection.clusters_here().get(address(), os.getuid())
    record = f"{run.url}/run.json"
    if "://" in run.url:
        is_own = storage_path is not None
    else:
        is_own = os.path.exists(record) and os.stat(record).st_uid == os.getuid()
    if owner != os.getuid() and not is_own:
        raise ClusterError(
            f"the Ray cluster at {address()} is of another user of this machine, and so may be the "
            f"run at {redact_url(run.url)}: status and logs read it, and only its owner changes it."
            " For a run of yours in a remote store, add --storage-path"
        )


def address() -> str:
    """Return the address of the cluster that this process is connected to."""
    return str(ray.get_runtime_context().gcs_address)


def attach_live(name: str, url: str | None = None) -> Run | None:
    """Return the run of that name of the connected cluster if its controller answers and, with
    `url`, that is its folder.
    """
    live = find(name)
    if live is None or (url is not None and not _same(url, live.url)):
        return None
    options = url.options if isinstance(url, StorageURL) and url.options else live.url.options
    return Run(live.spec, StorageURL(live.url, options), live.controller, ended=live.ended)


def _same(one: str, other: str) -> bool:
    """Return whether two URLs name the same folder, also if one is a relative path."""

    def whole(url: str) -> str:
        return url if "://" in url else os.path.realpath(url)

    return whole(one) == whole(other)


def stop_live(name: str, url: str) -> None:
    """Stop the live run of that name and folder, if there is one, and wait for its end."""
    was_connected = ray.is_initialized()
    try:
        run = find_live(name, url)
    except ClusterError:
        return  # the run's lease is waited for, if a cluster has it that does not answer
    run.stop("to be started again")
    with contextlib.suppress(TrainError):  # the new job may be there to fix it
        run.result()
    if not was_connected and has_owner():  # that Ray ends with the process that started it
        cluster_connection.disconnect()


def find_or_start(
    spec: JobSpec, job: StoredJob, runtime_env: Mapping[str, Any]
) -> tuple[Any, bool]:
    """Return the controller that leads this run, and whether it is new.

    Raises ClusterError if another run has its name.
    """
    cluster_connection.connect_or_start()
    live = find(spec.name)
    if live is not None and not live.ended:
        _check_is_the_same(live, spec, job.url)
        return live.controller, False
    if live is not None:  # its result is stored
        ask(live.controller, "forget", patience_s=PATIENCE_S)
        ray.kill(live.controller)
    try:
        return _start_controller(spec, job, runtime_env), True
    except _NameIsTaken as error:  # by another driver, at the same time
        live = find(spec.name)
        if live is None:
            raise ClusterError(
                f"another driver has started a run named {spec.name!r} on this cluster at the same "
                f"time, and its controller does not answer: start it again. Ray says: {error}"
            ) from error
        _check_is_the_same(live, spec, job.url)
        return live.controller, False


class _NameIsTaken(Exception):
    """There is a controller of that name."""


def _start_controller(spec: JobSpec, job: StoredJob, runtime_env: Mapping[str, Any]) -> Any:
    """Start a controller, and leave nothing of the job in the GCS if it does not start."""
    from elastic_dp.cluster.ray.controller_actor import ControllerActor

    run = f"{spec.name}-{secrets.token_hex(2)}"
    store_job(run, job)
    try:
        try:
            controller = ControllerActor.options(  # type: ignore[attr-defined]
                name=spec.name + CONTROLLER,
                namespace=NAMESPACE,
                lifetime="detached",
                runtime_env=dict(runtime_env) or None,
                label_selector={worker_placement.MARKET: "!in(spot)"},
                fallback_strategy=[{"label_selector": {}}],
            ).remote(run)
        except ValueError as error:
            raise _NameIsTaken(error) from error
        ask(controller, "about", patience_s=PATIENCE_S)
    except ray.exceptions.RayActorError as error:
        forget(run)
        raise ClusterError(
            f"the controller of the run {spec.name!r} did not start: {_cause(error)}. Where a "
            "module is missing that train imports and this process has not imported, install it on "
            f"the cluster, or send it by runtime_env. Ray says: {error}"
        ) from error
    except BaseException:
        forget(run)
        raise
    return controller


def _cause(error: Exception) -> str:
    """Return the last line of what Ray says: the error of the process that it has started."""
    return str(error).strip().rpartition("\n")[2].strip().rstrip(".")


def _check_is_the_same(live: LiveController, spec: JobSpec, url: str) -> None:
    """Raise ClusterError for a run in another folder; warn of settings that this start would change
    but does not.
    """
    if live.url != url:
        raise ClusterError(
            f"a run named {spec.name!r} is live on this cluster, at {live.url}; wait for it, "
            "stop it, or give "
            "this one another name"
        )
    now, asked = RunLimits.of(live.spec), RunLimits.of(spec)
    differing = [f"{now}, not {asked}"] if now != asked else []
    for part in ("scaling", "checkpoint", "failure"):
        here, wanted = getattr(live.spec, part), getattr(spec, part)
        for field in dataclasses.fields(here):
            is_so, would_be = getattr(here, field.name), getattr(wanted, field.name)
            if is_so != would_be:
                differing.append(f"{part}.{field.name}={is_so!r}, not {would_be!r}")
    if differing:
        warn_at_call(
            f"the run {spec.name!r} is live with other limits or settings, which stay as they are: "
            f"{'; '.join(differing)}. Run.scale or `elastic-dp scale` changes its size, "
            "`elastic-dp run JOB.py --restart` the rest"
        )


@dataclass(frozen=True)
class LiveController:
    """A controller that answers, and what it reports of its run."""

    controller: Any
    spec: JobSpec
    url: StorageURL
    ended: bool


def find(name: str) -> LiveController | None:
    """Return the controller of that name, or None."""
    try:
        controller = controller_of(name)
        spec, url, ended = ask(controller, "about", patience_s=PATIENCE_S)
    except (ValueError, ray.exceptions.RayActorError):
        return None  # there is none, or it is ending
    return LiveController(controller, spec, url, ended)


def names() -> list[str]:
    """Return the names of runs that are live, or whose controller still answers after their end."""
    actors = list_named_actors(all_namespaces=True)
    ours = [actor["name"] for actor in actors if actor["namespace"] == NAMESPACE]
    return sorted(name.removesuffix(CONTROLLER) for name in ours if name.endswith(CONTROLLER))


def controller_of(name: str) -> Any:
    """Return the actor. Raises ValueError if there is none."""
    return ray.get_actor(name + CONTROLLER, namespace=NAMESPACE)


def runs(address: str | None) -> list[dict[str, Any]]:
    """Return the status of each run of the cluster at `address` (see `cluster_connection.connect`);
    only the phase "unknown" if a controller does not answer in time. Raises ClusterError.
    """
    cluster_connection.connect(address)
    found = {}
    for name in names():
        with contextlib.suppress(ValueError):  # it has gone since
            found[name] = controller_of(name)
    asked: dict[str, Any] = {name: controller.status.remote() for name, controller in found.items()}
    until = time.monotonic() + _ANSWER_S
    rows = []
    for name, answer in asked.items():
        try:
            said = ray.get(answer, timeout=max(0.0, until - time.monotonic()))
        except ray.exceptions.RayError as error:
            said = {"phase": "unknown", "reason": f"no answer: {type(error).__name__}"}
        rows.append({"name": name} | said)
    return rows
