"""Which runs a Ray cluster has, and jobs that it is given.

A run is found by the name of its controller's actor. Jobs need Ray's dashboard (`pip install 'ray[default]'` there),
and nothing else does.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from typing import Any

import ray
from ray.util import list_named_actors

from elastic_dp.cluster.ray_actors import NAMESPACE
from elastic_dp.errors import ClusterError

CONTROLLER = "/controller"  # behind the run's name: that of the actor
_ANSWER_S = 10.0  # what a controller may take to say how its run stands
_LOOK_S = 1.0  # how often a job is asked whether it has ended


def connect(address: str | None) -> None:
    """To `address`, or else to RAY_ADDRESS or the cluster on this machine; to none where a connection is there."""
    if ray.is_initialized():
        return
    try:
        ray.init(address=address or "auto", log_to_driver=False)
    except (ConnectionError, ValueError, ray.exceptions.AuthenticationError) as error:
        raise ClusterError(
            f"cannot connect to a Ray cluster at {address or 'this machine'}: give --address as HOST:6379, or set "
            "RAY_ADDRESS; one with token authentication needs RAY_AUTH_MODE=token, and its token in RAY_AUTH_TOKEN or "
            f"~/.ray/auth_token. Ray says: {error}"
        ) from error


def names() -> list[str]:
    """Of the runs that are live, or ended so lately that their controller still answers."""
    actors = list_named_actors(all_namespaces=True)
    ours = [actor["name"] for actor in actors if actor["namespace"] == NAMESPACE]
    return sorted(name.removesuffix(CONTROLLER) for name in ours if name.endswith(CONTROLLER))


def controller_of(name: str) -> Any:
    """The actor. Raises ValueError where there is none."""
    return ray.get_actor(name + CONTROLLER, namespace=NAMESPACE)


def runs() -> list[dict[str, Any]]:
    """The status of each; of one whose controller does not answer in time, only that."""
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


def submit(
    address: str | None,
    entrypoint: str,
    *,
    working_dir: str,
    env: Mapping[str, str],
    submission_id: str | None,
) -> tuple[Any, str]:
    """Give Ray a job; returns the client and the job's id."""
    from ray.job_submission import JobSubmissionClient

    with _dashboard():
        with _going_by(address):
            client = JobSubmissionClient(address)
        job = client.submit_job(
            entrypoint=entrypoint,
            submission_id=submission_id,
            runtime_env={"working_dir": working_dir, "env_vars": dict(env)},
        )
    return client, job


def follow_job(client: Any, job: str, show: Any) -> int:
    """Show what the job prints until it has ended; its exit code, or 1 where Ray knows none."""
    shown = 0
    while True:
        with _dashboard():
            found = client.get_job_info(job)
            text = client.get_job_logs(job)
        show(text[shown:])
        shown = len(text)
        if found.status.is_terminal():
            code = found.driver_exit_code
            return (0 if found.status == "SUCCEEDED" else 1) if code is None else int(code)
        time.sleep(_LOOK_S)


@contextlib.contextmanager
def _going_by(address: str | None) -> Iterator[None]:
    """Its client would rather go by RAY_ADDRESS than by an address that it is given."""
    name, before = "RAY_API_SERVER_ADDRESS", os.environ.get("RAY_API_SERVER_ADDRESS")
    if address not in (None, os.environ.get("RAY_ADDRESS")):
        os.environ[name] = str(address)
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before


@contextlib.contextmanager
def _dashboard() -> Iterator[None]:
    """Its client has no errors of its own: what is no HTTP answer, or a bad one, says so in words."""
    try:
        yield
    except (RuntimeError, OSError, ValueError, ImportError, ray.exceptions.RayError) as error:
        raise ClusterError(f"Ray's dashboard does not take the job: {error}") from error
