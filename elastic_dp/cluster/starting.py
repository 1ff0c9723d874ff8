"""Starting a run's controller on a cluster, or joining the one that is there: for `ElasticTrainer.start`."""

from __future__ import annotations

import dataclasses
import os
import secrets
import warnings
from collections.abc import Mapping
from typing import Any

import ray

from elastic_dp.cluster import placing
from elastic_dp.cluster.finding import CONTROLLER, NAMESPACE, PATIENCE_S, Present, find
from elastic_dp.cluster.kept import forget, keep_job, note_owner
from elastic_dp.cluster.ray_actors import ControllerActor
from elastic_dp.cluster.record import Limits, RunRecord
from elastic_dp.cluster.run import ask, ray_ends_with_us
from elastic_dp.errors import ClusterError
from elastic_dp.spec import JobSpec
from elastic_dp.train.fault_injection import WorkerFault


def lead(
    spec: JobSpec,
    url: str,
    pickled: bytes,
    index: Any,
    faults: tuple[WorkerFault, ...],
    record: RunRecord,
    runtime_env: Mapping[str, Any],
) -> tuple[Any, bool]:
    """The controller of the run, and whether it is a new one, or the one that leads it already."""
    if not ray.is_initialized():
        if "RAY_ADDRESS" in os.environ:
            ray.init(log_to_driver=False)
        else:
            ray.init(address="local", log_to_driver=False, include_dashboard=False)
    if ray_ends_with_us():
        note_owner()
    present = find(spec.name)
    if present is not None and not present.ended:
        return _join(present, spec, url), False
    if present is not None:  # its result is kept
        ask(present.controller, "forget", patience_s=PATIENCE_S)
        ray.kill(present.controller)
    run = f"{spec.name}-{secrets.token_hex(2)}"
    keep_job(run, (pickled, index, secrets.token_bytes(32), url, faults, record))
    controller = ControllerActor.options(  # type: ignore[attr-defined]
        name=spec.name + CONTROLLER,
        namespace=NAMESPACE,
        lifetime="detached",
        runtime_env=dict(runtime_env) or None,
        **placing.options([{placing.MARKET: "!in(spot)"}, {}]),
    ).remote(run)
    try:
        ask(controller, "about", patience_s=PATIENCE_S)
    except ray.exceptions.RayActorError as error:
        forget(run)
        raise ClusterError(
            f"the controller of the run {spec.name!r} did not start. A module that train imports and "
            "this process has not imported must be installed on the cluster, or sent by runtime_env. "
            f"Ray says: {error}"
        ) from error
    return controller, True


def _join(present: Present, spec: JobSpec, url: str) -> Any:
    if present.url != url:
        raise ClusterError(
            f"a run named {spec.name!r} is live on this cluster, at {present.url}; wait for it, stop it, or give "
            "this one another name"
        )
    now, asked = Limits.of(present.spec), Limits.of(spec)
    differing = [f"{now}, not {asked}"] if now != asked else []
    for part in ("scaling", "checkpoint", "failure"):
        here, wanted = getattr(present.spec, part), getattr(spec, part)
        for field in dataclasses.fields(here):
            is_so, would_be = getattr(here, field.name), getattr(wanted, field.name)
            if is_so != would_be:
                differing.append(f"{part}.{field.name}={is_so!r}, not {would_be!r}")
    if differing:
        warnings.warn(
            f"the run {spec.name!r} is live with other limits or settings, which stay as they are: "
            f"{'; '.join(differing)}. Run.scale or `elastic-dp scale` changes its size, `elastic-dp restart` the rest",
            stacklevel=4,
        )
    return present.controller
