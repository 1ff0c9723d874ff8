"""Attaches to a run that is live on the cluster, to one that has ended, or to one that is started.

Starting a controller imports torch, so that import is in the function: the command line attaches
without it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
from collections.abc import Mapping
from typing import Any

import ray

from elastic_dp.cluster.console import warn_at_call
from elastic_dp.cluster.ray import cluster_connection, worker_placement
from elastic_dp.cluster.run_handle import Run, ask
from elastic_dp.cluster.runs.live_runs import (
    CONTROLLER,
    NAMESPACE,
    PATIENCE_S,
    LiveController,
    find,
    names,
)
from elastic_dp.cluster.runs.ray_kv_state import StoredJob, forget, store_job
from elastic_dp.config import DataConfig, JobSpec
from elastic_dp.errors import ClusterError
from elastic_dp.run_record import RunLimits, read_result, run_url
from elastic_dp.storage import StorageURL
from elastic_dp.wording import did_you_mean


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
    with contextlib.suppress(ClusterError):  # no cluster: only what is stored
        cluster_connection.connect(None)
        if (run := attach_live(name, url)) is not None:
            return run
    stored = None if url is None else read_result(url)
    if url is not None and stored is not None:
        spec = JobSpec(name=name, data=DataConfig("-", micro_batch_size=1), max_steps=1)
        return Run(spec, url, stored=stored)
    live = names() if ray.is_initialized() else []
    there = ", ".join(live)
    raise ClusterError(
        f"no run named {name!r} is live on this cluster, which has: {there or 'none'}"
        + (f". And {url} has no result" if url else ". One that ended is found by its storage_path")
        + did_you_mean(name, live)
    )


def attach_live(name: str, url: str | None = None) -> Run | None:
    """Return the run of that name if its controller answers and, with `url`, that is its folder."""
    live = find(name)
    if live is None or (url is not None and not _same(url, live.url)):
        return None
    options = url.options if isinstance(url, StorageURL) and url.options else live.url.options
    return Run(live.spec, StorageURL(live.url, options), live.controller, ended=live.ended)


def _same(one: str, other: str) -> bool:
    """Return whether two URLs name the same folder, also if one is a relative path."""

    def whole(url: str) -> str:
        return url if "://" in url else os.path.abspath(url)

    return whole(one) == whole(other)


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
    return _start_controller(spec, job, runtime_env), True


def _start_controller(spec: JobSpec, job: StoredJob, runtime_env: Mapping[str, Any]) -> Any:
    from elastic_dp.cluster.ray.controller_actor import ControllerActor

    run = f"{spec.name}-{secrets.token_hex(2)}"
    store_job(run, job)
    controller = ControllerActor.options(  # type: ignore[attr-defined]
        name=spec.name + CONTROLLER,
        namespace=NAMESPACE,
        lifetime="detached",
        runtime_env=dict(runtime_env) or None,
        **worker_placement.actor_options([{worker_placement.MARKET: "!in(spot)"}, {}]),
    ).remote(run)
    try:
        ask(controller, "about", patience_s=PATIENCE_S)
    except ray.exceptions.RayActorError as error:
        forget(run)
        raise ClusterError(
            f"the controller of the run {spec.name!r} did not start. A module that train "
            "imports and "
            "this process has not imported must be installed on the cluster, or sent by "
            "runtime_env. "
            f"Ray says: {error}"
        ) from error
    return controller


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
            "`elastic-dp restart` the rest"
        )
