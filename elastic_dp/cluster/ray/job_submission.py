"""Jobs that a cluster is given, by Ray's Jobs API. It needs Ray's dashboard (`pip install 'ray[default]'` there)."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import ray

from elastic_dp.cluster.ray import cluster_connection
from elastic_dp.errors import ClusterError

_LOOK_S = 1.0  # how often a job is asked whether it has ended


def submit(
    address: str | None,
    entrypoint: str,
    *,
    working_dir: str,
    env: Mapping[str, str],
    submission_id: str | None,
    tell: Callable[[str], None],
) -> tuple[Any, str]:
    """Give Ray a job; returns the client and the job's id. `tell`: see `connect`."""
    from ray.job_submission import JobSubmissionClient

    if "RAY_API_SERVER_ADDRESS" not in os.environ:
        address = address or cluster_connection.newest_on_this_machine(tell)
    cluster_connection.send_token()
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
