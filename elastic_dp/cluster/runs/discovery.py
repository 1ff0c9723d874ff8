"""Which runs a Ray cluster has, `elastic_dp.attach`, and jobs that a cluster is given.

A run is found by the name of its controller's actor. Jobs need Ray's dashboard (`pip install 'ray[default]'` there),
and nothing else does. Nothing here imports torch: the command line asks without it.
"""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray._private import services
from ray._raylet import Config  # type: ignore[attr-defined]
from ray.util import list_named_actors

from elastic_dp.cluster.run_handle import Run, ask
from elastic_dp.cluster.runs.run_record import read_result, run_url
from elastic_dp.errors import ClusterError
from elastic_dp.spec import DataConfig, JobSpec

NAMESPACE = "elastic_dp"  # Ray's, of all our actors
PATIENCE_S = 60.0  # with a controller that restarts, before anything is known of its run
CONTROLLER = "/controller"  # behind the run's name: that of the actor
_ANSWER_S = 10.0  # what a controller may take to say how its run stands
_LOOK_S = 1.0  # how often a job is asked whether it has ended


@dataclass(frozen=True)
class LiveController:
    """A controller that is there, and what it says of itself."""

    controller: Any
    spec: JobSpec
    url: str
    ended: bool


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=4)  # at the user's call of attach


def connect(address: str | None, tell: Callable[[str], None] = _warn) -> None:
    """To `address`, or else to RAY_ADDRESS or the cluster on this machine; to none where a connection is there.

    `tell`: is told which cluster was taken, where several run on this machine.
    """
    if ray.is_initialized():
        return
    address = address or _on_this_machine(tell)
    _send_token()
    try:
        ray.init(address=address or "auto", log_to_driver=False)
    except (ConnectionError, ValueError, ray.exceptions.AuthenticationError) as error:
        raise ClusterError(
            f"cannot connect to a Ray cluster at {address or 'this machine'}: give --address as HOST:6379, or set "
            "RAY_ADDRESS; one with token authentication needs RAY_AUTH_MODE=token, and its token in RAY_AUTH_TOKEN or "
            "~/.ray/auth_token. A run that has ended is found without a cluster: elastic-dp status RUN --storage-path "
            f"URL. Ray says: {error}"
        ) from error


def _send_token() -> None:
    """Have Ray send the token that is saved for this user, unless RAY_AUTH_MODE says otherwise. A Ray that a script
    starts asks for it by default, and a client sends it only where it is told to. Others do not look at it."""
    path = os.environ.get("RAY_AUTH_TOKEN_PATH") or os.path.expanduser("~/.ray/auth_token")
    if "RAY_AUTH_MODE" not in os.environ and (
        "RAY_AUTH_TOKEN" in os.environ or os.path.exists(path)
    ):
        os.environ["RAY_AUTH_MODE"] = "token"
        Config.initialize("")  # reads it again


def _on_this_machine(tell: Callable[[str], None]) -> str | None:
    """The address of the newest cluster that has a node here; None: as Ray finds it, by RAY_ADDRESS first.

    Of several, Ray itself takes the one of the last `ray start`, also where that is gone, or else any.
    """
    if os.environ.get("RAY_ADDRESS"):
        return None
    found = _newest_first()
    if len(found) > 1:
        tell(
            f"{len(found)} Ray clusters run on this machine: this is the newest, at {found[0]}; choose another by "
            f"--address or RAY_ADDRESS: {', '.join(found[1:])}"
        )
    return found[0] if found else None


def _newest_first() -> list[str]:
    """Addresses of the clusters of which a node runs here: those of this user, or, without one, all."""
    started: dict[bool, dict[str, float]] = {True: {}, False: {}}
    for process in services.psutil.process_iter(["cmdline", "create_time", "uids"]):
        words = process.info["cmdline"] or [""]
        if os.path.basename(words[0]) != "raylet":
            continue
        mine = process.info["uids"] is not None and process.info["uids"].real == os.getuid()
        for word in words:
            if word.startswith("--gcs-address="):
                times = started[mine]
                address, at = word.partition("=")[2], process.info["create_time"]
                times[address] = min(at, times.get(address, at))
    found = started[True] or started[False]
    return sorted(found, key=lambda address: -found[address])


def attach(name: str, storage_path: str | os.PathLike[str] | None = None) -> Run:
    """The run of that name: the live one on this cluster, or one that has ended at `storage_path`.

    Raises ClusterError where there is neither.
    """
    url = None if storage_path is None else run_url(name, storage_path)
    with contextlib.suppress(ClusterError):  # no cluster: only what is stored
        connect(None)
        if (run := live(name, url)) is not None:
            return run
    stored = None if url is None else read_result(url)
    if stored is not None:
        spec = JobSpec(name=name, data=DataConfig("-", micro_batch_size=1), max_steps=1)
        return Run(spec, str(url), stored=stored)
    there = ", ".join(names()) if ray.is_initialized() else ""
    raise ClusterError(
        f"no run named {name!r} is live on this cluster, which has: {there or 'none'}"
        + (f". And {url} has no result" if url else ". One that ended is found by its storage_path")
    )


def live(name: str, url: str | None = None) -> Run | None:
    """The run of that name whose controller answers; with `url`, only where that is its folder."""
    present = find(name)
    if present is None or (url is not None and not _same(url, present.url)):
        return None
    return Run(present.spec, present.url, present.controller, ended=present.ended)


def _same(one: str, other: str) -> bool:
    """Whether two URLs are of one folder, also where one is a relative path."""

    def whole(url: str) -> str:
        return url if "://" in url else os.path.abspath(url)

    return whole(one) == whole(other)


def find(name: str) -> LiveController | None:
    """The controller of that name, if there is one."""
    try:
        controller = controller_of(name)
        spec, url, ended = ask(controller, "about", patience_s=PATIENCE_S)
    except (ValueError, ray.exceptions.RayActorError):
        return None  # none, or one that goes
    return LiveController(controller, spec, url, ended)


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
    tell: Callable[[str], None],
) -> tuple[Any, str]:
    """Give Ray a job; returns the client and the job's id. `tell`: see `connect`."""
    from ray.job_submission import JobSubmissionClient

    if "RAY_API_SERVER_ADDRESS" not in os.environ:
        address = address or _on_this_machine(tell)
    _send_token()
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
