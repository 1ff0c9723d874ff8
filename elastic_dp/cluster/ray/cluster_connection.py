"""The connection to a Ray cluster: a named one, or this user's on this machine."""

from __future__ import annotations

import logging
import os
import socket
import time

import ray

from elastic_dp.cluster.ray import private
from elastic_dp.cluster.runs.ray_kv_state import mark_owner
from elastic_dp.errors import ClusterError

_LOG = logging.getLogger(__name__)
_LISTENER_S = 10.0
_ANSWER_S = 2.0  # of an address that may be stale
_TOKEN_SETUP = "ray._private.authentication.authentication_token_setup"
_SLOW_START = "timed out during startup"


def connect(address: str | None, wait_s: float = _LISTENER_S) -> None:
    """Connect to `address`, or to RAY_ADDRESS, or to this user's cluster on this machine, unless
    connected. Waits `wait_s` for somebody to listen at `address`.

    Raises ClusterError if the connection fails, or if this user has several clusters here.
    """
    if ray.is_initialized():
        return
    try:
        if address is not None:
            _wait_for_a_listener(address, wait_s)
        elif not os.environ.get("RAY_ADDRESS"):
            address = _only(clusters_of_this_user())
        send_token()
        named = address or os.environ.get("RAY_ADDRESS") or "auto"
        ray.init(address=named, log_to_driver=False, logging_level=logging.WARNING)
    # An address with another protocol is an AssertionError to Ray 2.56.
    except (OSError, ValueError, AssertionError, ray.exceptions.AuthenticationError) as error:
        raise ClusterError(
            f"cannot connect to a Ray cluster at {address or 'this machine'}: give --address "
            "as HOST:6379, or set RAY_ADDRESS; one with token authentication needs "
            "RAY_AUTH_MODE=token, and its token in RAY_AUTH_TOKEN or ~/.ray/auth_token. A run "
            "that has ended is found without a cluster: elastic-dp status RUN --storage-path "
            f"URL. Ray says: {error}"
        ) from error


def connects(address: str) -> bool:
    """Connect to `address` and return True, if a Ray cluster answers there now."""
    try:
        connect(address, wait_s=0.0)
    except ClusterError:
        return False
    return True


def _wait_for_a_listener(address: str, wait_s: float) -> None:
    """Wait until somebody listens at `address`. Raises OSError after that time; Ray would try for
    two minutes, and print what it tries.
    """
    host, _, port = address.rpartition(":")
    if "://" in address or not port.isdigit():
        return  # Ray knows what it means, or says what is wrong
    until = time.monotonic() + wait_s
    while True:
        try:
            named = host.strip("[]"), int(port)
            with socket.create_connection(named, timeout=max(wait_s, _ANSWER_S)):
                return
        except OSError:
            if time.monotonic() >= until:
                raise
        time.sleep(0.2)  # a head that restarts may come back


def disconnect() -> None:
    """Disconnect from the cluster, so that the next connection may be to another one."""
    ray.shutdown()
    os.environ.pop("RAY_ADDRESS", None)


def connect_or_start() -> None:
    """Connect to the cluster of RAY_ADDRESS, or start a Ray that ends with this process. Raises
    ClusterError."""
    if os.environ.get("RAY_ADDRESS", "local") not in ("", "local"):
        connect(None)
    elif not ray.is_initialized():
        _start_local()
    if private.owns_cluster():
        mark_owner()


def _start_local() -> None:
    """Start a Ray on this machine. Raises ClusterError if it does not start.

    Such a Ray requires a token, which Ray saves as ~/.ray/auth_token and warns of: it keeps other
    users of the machine out. docs/security.md says so.

    Ray gives its own processes 15 and 30 s to start (raylet, `WaitForDashboardAgentPorts`), and no
    setting extends that. A busy machine may take longer the first time, while files are read from
    disk, so Ray gets a second try.
    """
    logging.getLogger(_TOKEN_SETUP).setLevel(logging.ERROR)
    for is_last in (False, True):
        try:
            ray.init(
                address="local",
                log_to_driver=False,
                include_dashboard=False,
                logging_level=logging.WARNING,
            )
            return
        except Exception as error:  # Ray raises no other type
            ray.shutdown()
            if _SLOW_START not in str(error):
                raise
            if is_last:
                raise ClusterError(
                    "Ray did not start on this machine within its time limit of 30 s, twice. The "
                    "machine may be too busy: try again, or start Ray first (ray start --head) "
                    f"and set RAY_ADDRESS. Ray says: {error}"
                ) from error
            _LOG.warning("Ray did not start within its time limit of 30 s; it is started again")


def send_token() -> None:
    """Let Ray send this user's saved token, unless RAY_AUTH_MODE is set.

    A Ray that a script starts requires the token by default, and a client sends it only if it is
    configured to. Clusters without authentication ignore it.
    """
    path = os.environ.get("RAY_AUTH_TOKEN_PATH") or os.path.expanduser("~/.ray/auth_token")
    if "RAY_AUTH_MODE" not in os.environ and (
        "RAY_AUTH_TOKEN" in os.environ or os.path.exists(path)
    ):
        os.environ["RAY_AUTH_MODE"] = "token"
        private.reload_authentication()


def clusters_of_this_user() -> list[str]:
    """Return the addresses of this user's clusters with a node on this machine, newest first.

    Those of other users are for --address alone: a run of somebody else may have the same name.
    """
    return [address for address, user in clusters_here().items() if user == os.getuid()]


def clusters_here() -> dict[str, int]:
    """Return the users of clusters with a node on this machine by their addresses, newest first."""
    started: dict[str, tuple[float, int]] = {}
    for process in private.psutil().process_iter(["cmdline", "create_time", "uids"]):
        words, uids = process.info["cmdline"] or [""], process.info["uids"]
        if os.path.basename(words[0]) != "raylet" or uids is None:
            continue
        for word in words:
            if word.startswith("--gcs-address="):
                address, at = word.partition("=")[2], (process.info["create_time"], uids.real)
                started[address] = min(at, started.get(address, at))
    return {address: at[1] for address, at in sorted(started.items(), key=lambda x: -x[1][0])}


def _only(addresses: list[str]) -> str:
    """Return the one address. Raises ClusterError if there are several, OSError if there is none:
    Ray itself would take that of the last `ray start`, also if that is gone or somebody else's.
    """
    if not addresses:
        raise OSError("this user has no Ray cluster on this machine")
    if len(addresses) > 1:
        raise ClusterError(
            f"{len(addresses)} Ray clusters of this user run on this machine: choose one by "
            f"--address or RAY_ADDRESS: {', '.join(addresses)}"
        )
    return addresses[0]
