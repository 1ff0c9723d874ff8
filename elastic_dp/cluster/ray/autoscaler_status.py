"""Why no node comes, in the words of Ray's autoscaler: what it could not get, what no node has,
what it waits for.

The autoscaler reports to the GCS whenever it has looked at the cluster. One that cannot look,
because Kubernetes refuses its requests, reports nothing and writes the reason to its log on the
head; the log is read when it has been silent for a while. Without an autoscaler there is nothing to
say. Only the introductions of its words are ours.

The GCS's message is read here and not through `ray.autoscaler.v2.sdk.get_cluster_status`, which
leaves out infeasible requests and when the autoscaler last looked; and no API of Ray has the reason
of a failed launch, so the log stays the only source.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray
from ray.autoscaler.v2.event_logger import AutoscalerEventLogger
from ray.core.generated import autoscaler_pb2
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

_pb: Any = autoscaler_pb2  # what protobuf makes has no types
_worker: Any = ray._private.worker
SILENT_S = 30.0  # it looks each 5 s, or as often as AUTOSCALER_UPDATE_INTERVAL_S says
RECENT_S = 60.0  # a failure; while it lasts, there is a new one each time it looks
AGAIN_S = 30.0  # between two readings of its log
_RPC_S = 5.0
_READ_S = 20.0  # a process on the head that reads the log
_READ_BYTES = 1 << 16
_HEAD = "node:__internal_head__"  # Ray's resource of that node
_REFUSED = "->ALLOCATION_FAILED "
_REQUEST = re.compile(r" with request id [\w-]+")  # another one each time
_RECORD = re.compile(r"^\d{4}-\d\d-\d\d \S+\t(\w+) \S+ -- ", re.M)


class AutoscalerStatus:
    """`needs`: resources of one worker. All times are of `time.time`."""

    def __init__(self, needs: Mapping[str, float]) -> None:
        self._needs = dict(needs)
        self._seen, self._since = -1, 0.0  # its newest look that we know of, and since when
        self._words, self._read_at = "", 0.0

    def why(self, now: float) -> str:
        """Asked only while a worker waits for a node; empty when it has nothing to say. Raises what
        Ray raises."""
        reply = _pb.GetClusterStatusReply()
        reply.ParseFromString(_worker.global_worker.gcs_client.get_cluster_status(timeout_s=_RPC_S))
        state = reply.autoscaling_state
        if state.last_seen_cluster_resource_state_version != self._seen:
            self._seen, self._since = state.last_seen_cluster_resource_state_version, now
        silent = now - self._since > SILENT_S
        if (silent or _failed(state, now)) and now > self._read_at + AGAIN_S:
            self._words, self._read_at = _read_on_head(), now
        if silent:
            return self._words and f"Ray's autoscaler does not look at the cluster: {self._words}"
        said = told(state, self._needs, now, self._words)
        return said and f"Ray's autoscaler: {said}"


def told(state: Any, needs: Mapping[str, float], now: float, words: str) -> str:
    """`words`: the last of its log, since the state has no reason of a failure. Of what nobody has,
    only what our workers ask for."""
    sentences = []
    if groups := _failed(state, now):
        sentences.append(f"it cannot add nodes of group {', '.join(groups)}: {words}")
    ours = [r for r in state.infeasible_resource_requests if _is_ours(r.resources_bundle, needs)]
    if ours:
        sentences.append(_infeasible(ours))
    waits: Counter[str] = Counter(i.ray_node_type_name for i in state.pending_instances)
    for request in state.pending_instance_requests:
        waits[request.ray_node_type_name] += request.count
    if waits:
        named = ", ".join(f"{count} of group {group}" for group, count in sorted(waits.items()))
        sentences.append(f"it has asked for nodes that are not up yet: {named}")
    return "; ".join(sentences)


def last_words(log: str) -> str:
    """Of a log of Ray's, the last error (its exception, where there is one), or why a node was not
    to be had."""
    starts = [*_RECORD.finditer(log)]
    for at, start in reversed([*enumerate(starts)]):
        end = starts[at + 1].start() if at + 1 < len(starts) else len(log)
        first, *rest = log[start.end() : end].strip().splitlines() or [""]
        if _REFUSED in first:
            return _REQUEST.sub("", first.partition("): ")[2])
        if start[1] == "ERROR":
            return rest[-1] if rest else first
    return ""


def _failed(state: Any, now: float) -> list[str]:
    """The groups of which a node could not be had lately."""
    late = now - RECENT_S
    return sorted(
        {f.ray_node_type_name for f in state.failed_instance_requests if f.failed_ts > late}
    )


def _is_ours(bundle: Mapping[str, float], needs: Mapping[str, float]) -> bool:
    return {name: need for name, need in needs.items() if need} == dict(bundle)


def _infeasible(requests: list[Any]) -> str:
    """As it says so in its own log: the state has only what was asked for."""
    words: list[str] = []
    log: Any = SimpleNamespace(warning=words.append)
    AutoscalerEventLogger(log).log_cluster_scheduling_update({}, infeasible_requests=requests)
    return " ".join(words).rstrip(".")


def _read_on_head() -> str:
    """The last words of its log; empty where no head answers in time."""
    heads = [node["NodeID"] for node in ray.nodes() if node["Alive"] and _HEAD in node["Resources"]]
    if not heads:
        return ""
    there = NodeAffinitySchedulingStrategy(heads[0], soft=False)
    answer = _tail.options(num_cpus=0, scheduling_strategy=there).remote()
    try:
        return last_words(ray.get(answer, timeout=_READ_S))
    except ray.exceptions.RayError:
        return ""


@ray.remote(max_retries=0)
def _tail() -> str:
    logs = Path(_worker._global_node.get_logs_dir_path())
    path = logs / ray._private.ray_constants.MONITOR_LOG_FILE_NAME
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _READ_BYTES))
        return file.read().decode(errors="replace")
