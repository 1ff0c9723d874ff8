"""What this package uses of Ray that is not Ray's public interface, in one place.

Each function says in which version of Ray it was read. `tests/cluster/ray/test_private.py` has a
test of each one, which an upgrade of Ray must pass. All raise what Ray raises.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group_table

_RPC_S = 5.0
HEAD_RESOURCE = "node:__internal_head__"  # Ray 2.56-2.60: a resource of the head node alone
# Ray 2.60, `ray_constants`: the variable with what `worker_process_setup_hook` names, which may be
# given for a job alone. A worker's process calls it when it has connected.
SETUP_HOOK = "__RAY_WORKER_PROCESS_SETUP_HOOK_ENV_VAR"


@dataclass(frozen=True, slots=True)
class ActorEntry:
    """What the GCS knows about an actor. `node` may be set while it waits for room, and stays when
    it has died; `pid` is 0 until it has a process, `address` is that of its node.
    """

    name: str
    state: str
    node: str
    pid: int
    address: str


def draining_nodes() -> Mapping[str, int]:
    """Return the deadline of each node that drains, in milliseconds of the wall clock; 0: not
    known. Read in Ray 2.60: `GlobalState.get_draining_nodes`.
    """
    nodes: Mapping[str, int] = _state().get_draining_nodes()
    return nodes


def head_node() -> str:
    """Return the node of the GCS; empty if there is none at the moment."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    return next((node["NodeID"] for node in alive if HEAD_RESOURCE in node["Resources"]), "")


def free_resources() -> Mapping[str, Mapping[str, float]]:
    """Return the free resources of each node. Read in Ray 2.60:
    `GlobalState.available_resources_per_node`.
    """
    free: Mapping[str, Mapping[str, float]] = _state().available_resources_per_node()
    return free


def total_resources() -> Mapping[str, Mapping[str, float]]:
    """Return all resources of each node. Read in Ray 2.60:
    `GlobalState.total_resources_per_node`.
    """
    total: Mapping[str, Mapping[str, float]] = _state().total_resources_per_node()
    return total


def actor(handle: Any) -> ActorEntry | None:
    """Return what the GCS knows about an actor, also a dead one. Read in Ray 2.60:
    `GlobalState.actor_table`, `ActorHandle._actor_id`.
    """
    table = _state().actor_table(handle._actor_id.hex())
    return _entry(table) if table else None


def actors_in(*states: str) -> Iterator[ActorEntry]:
    """Yield the actors in these states. Read in Ray 2.60: `ray._private.state.actors`."""
    for state in states:
        yield from map(_entry, ray._private.state.actors(actor_state_name=state).values())


def placement_groups(run: str) -> dict[str, Any]:
    """Return the placement groups that are named run/worker, by worker. Read in Ray 2.60:
    `ray.util.placement_group_table`, `PlacementGroupID`.
    """
    from ray._raylet import PlacementGroupID

    return {
        table["name"].removeprefix(f"{run}/"): PlacementGroup(PlacementGroupID.from_hex(group))
        for group, table in placement_group_table().items()
        if table["name"].startswith(f"{run}/") and table["state"] != "REMOVED"
    }


def nodes_of(group: PlacementGroup) -> list[str]:
    """Return the node of each bundle of a placement group that has one."""
    return [node for node in placement_group_table(group)["bundles_to_node_id"].values() if node]


def owns_cluster() -> bool:
    """Return whether this process started the Ray cluster, so that both end together. Read in Ray
    2.60: `ray._private.worker._global_node`.
    """
    node = ray._private.worker._global_node
    return node is not None and bool(node.head)


def dashboard_url() -> str:
    """Return the dashboard's host and port; empty without one. Read in Ray 2.60:
    `ray._private.worker.get_dashboard_url`.
    """
    return ray._private.worker.get_dashboard_url() or ""


def reload_authentication() -> None:
    """Let Ray read its authentication settings from the environment again. Read in Ray 2.60:
    `ray._raylet.Config.initialize`.
    """
    from ray._raylet import Config  # type: ignore[attr-defined]

    Config.initialize("")


def psutil() -> Any:
    """Return the module psutil that Ray brings. Read in Ray 2.60: `ray._private.services`."""
    from ray._private import services

    return services.psutil


def cluster_status() -> Any:
    """Return the autoscaler's report: a `GetClusterStatusReply`. Read in Ray 2.60:
    `GcsClient.get_cluster_status`, `ray.core.generated.autoscaler_pb2`. The public
    `ray.autoscaler.v2.sdk.get_cluster_status` leaves out infeasible requests.
    """
    from ray.core.generated import autoscaler_pb2

    reply: Any = autoscaler_pb2.GetClusterStatusReply()  # type: ignore[attr-defined]
    worker: Any = ray._private.worker.global_worker
    reply.ParseFromString(worker.gcs_client.get_cluster_status(timeout_s=_RPC_S))
    return reply


def has_autoscaler() -> bool:
    """Return whether an autoscaler of version 2 or 1 adds nodes to this cluster. Read in Ray 2.60:
    the key `__autoscaling_status` of version 1.
    """
    version_1 = kv_get(b"__autoscaling_status") or b""
    return cluster_status().HasField("autoscaling_state") or b"autoscaler_report" in version_1


# The GCS's key-value store. Read in Ray 2.60: `ray.experimental.internal_kv`.


def kv_put(key: bytes, value: bytes, *, overwrite: bool = True) -> bool:
    """Store a value. Return whether the key existed before."""
    return bool(_kv()._internal_kv_put(key, value, overwrite=overwrite))


def kv_get(key: bytes) -> bytes | None:
    found = _kv()._internal_kv_get(key)
    return None if found is None else bytes(found)


def kv_exists(key: bytes) -> bool:
    return bool(_kv()._internal_kv_exists(key))


def kv_list(prefix: bytes) -> list[bytes]:
    return list(_kv()._internal_kv_list(prefix))


def kv_delete(key: bytes, *, is_prefix: bool = False) -> None:
    _kv()._internal_kv_del(key, del_by_prefix=is_prefix)


def _kv() -> Any:
    from ray.experimental import internal_kv

    return internal_kv


def _state() -> Any:
    import ray._private.state

    return ray._private.state.state


def _entry(table: Mapping[str, Any]) -> ActorEntry:
    at = table.get("Address", {})
    return ActorEntry(
        name=table.get("Name", ""),
        state=table["State"],
        node=at.get("NodeID") or "",
        pid=int(table.get("Pid") or 0),
        address=at.get("IPAddress") or "",
    )
