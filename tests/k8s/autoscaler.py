"""Ray's KubeRay autoscaler itself, in this process, over the emulated API and nodes that are there
on paper only.

All decisions are Ray's code: what it reads of the manifest, what it asks of the API, how long it
waits, what it reports. Ray's GCS is as much of it as the autoscaler asks for: the nodes, those of
running pods, and the demand, which a test sets.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import requests
from ray.autoscaler._private.kuberay import autoscaling_config, node_provider
from ray.autoscaler.v2.autoscaler import Autoscaler
from ray.autoscaler.v2.instance_manager import config
from ray.autoscaler.v2.instance_manager.cloud_providers.kuberay import cloud_provider
from ray.core.generated import autoscaler_pb2 as pb
from ray.core.generated.common_pb2 import LabelSelector, LabelSelectorOperator

from elastic_dp.cluster.ray import worker_placement
from elastic_dp.config import label_values
from tests.k8s.emulator import NAME, NAMESPACE, Kubernetes
from tests.k8s.pods import HEAD, Pod

HEAD_ONLY = "node:__internal_head__"  # Ray's own name for the resource
HOUR_MS = 3_600_000
_ROUNDS = 10  # of looks; each decision takes two or three
Labels = Mapping[str, str]


@dataclass
class _Process:
    pid: int = 0
    code: int | None = None

    def poll(self) -> int | None:
        return self.code

    def terminate(self) -> None:
        """Ray ends as soon as its node is empty, and here all are."""
        self.code = 0


class PaperNodes:
    name = "paper"

    def start_node(self, name: str, group_name: str, group: Mapping[str, Any]) -> _Process:
        return _Process()


@dataclass
class PaperGcs:
    """`demand`: what each waiting actor asks for, and of which nodes, the best first."""

    kubernetes: Kubernetes
    demand: list[tuple[Mapping[str, float], Sequence[Labels]]] = field(default_factory=list)
    address: str = "127.0.0.1:0"
    versions: Any = field(default_factory=lambda: itertools.count(1))

    def get_cluster_resource_state(self) -> bytes:
        """Each node holds one actor of the demand, or has been idle for an hour."""
        state = pb.ClusterResourceState(cluster_resource_state_version=next(self.versions))
        pods = self.kubernetes.pods.values()
        running = [pod for pod in pods if pod.process is not None]
        waiting = list(self.demand)
        for pod in running:
            taken = next((actor for actor in waiting if _may_run(actor[1], pod.group)), None)
            if taken is not None and pod.group != HEAD:
                waiting.remove(taken)
                _add(state, pod, {"CPU": 1.0}, idle_ms=0)
            else:
                _add(state, pod, {HEAD_ONLY: 1.0} if pod.group == HEAD else {"CPU": 1.0}, HOUR_MS)
        for needs, wishes in waiting:
            state.pending_resource_requests.add(request=_request(needs, wishes), count=1)
        reply = pb.GetClusterResourceStateReply(cluster_resource_state=state)
        return reply.SerializeToString()


def _add(state: pb.ClusterResourceState, pod: Pod, has: Mapping[str, float], idle_ms: int) -> None:
    state.node_states.add(
        node_id=pod.name.encode(),
        instance_id=pod.name,
        ray_node_type_name=pod.group,
        status=pb.NodeStatus.IDLE if idle_ms else pb.NodeStatus.RUNNING,
        idle_duration_ms=idle_ms,
        total_resources=has,
        available_resources=has if idle_ms else {},
    )


class Client:
    """Ray's HTTP client of the API, without HTTP: what the server refuses is raised in the same
    words."""

    def __init__(self, kubernetes: Kubernetes) -> None:
        self._kubernetes = kubernetes

    def get(self, path: str) -> Any:
        return self._ask("GET", path)

    def patch(self, path: str, payload: Any, content_type: str = "") -> Any:
        return self._ask("PATCH", path, payload)

    def _ask(self, method: str, path: str, payload: Any = None) -> Any:
        url = node_provider.url_from_resource(NAMESPACE, path, "v1", "kubernetes")
        answer = requests.Response()
        answer.url = url
        place = url.removeprefix("https://kubernetes")
        answer.status_code, answer._content = self._kubernetes.answer(
            method, place, json.dumps(payload).encode()
        )
        answer.reason = {401: "Unauthorized", 403: "Forbidden"}.get(answer.status_code)
        answer.raise_for_status()
        return answer.json()


class Cluster:
    """`spec`: of the RayCluster. Waits of `waits_s` (names as in Ray's InstanceReconcileConfig) are
    over at once."""

    def __init__(self, spec: Mapping[str, Any], patch: pytest.MonkeyPatch, *waits: str) -> None:
        self.kubernetes = Kubernetes(spec, PaperNodes())
        self.gcs = PaperGcs(self.kubernetes)
        client = Client(self.kubernetes)
        patch.setattr(cloud_provider, "KubernetesHttpApiClient", lambda namespace: client)
        patch.setattr(autoscaling_config, "RAYCLUSTER_FETCH_RETRY_S", 0)
        over = config.InstanceReconcileConfig(**dict.fromkeys(waits, 0))
        patch.setattr(config.AutoscalingConfig, "get_instance_reconcile_config", lambda _: over)
        producer = autoscaling_config.AutoscalingConfigProducer(NAME, NAMESPACE)
        producer.kubernetes_api_client = client
        reader = config.KubeRayConfigReader(producer)
        self.autoscaler = Autoscaler("session", reader, self.gcs)

    def look(self) -> pb.AutoscalingState | None:
        """What the autoscaler reports of one look; the operator has looked before."""
        self.kubernetes.operate()
        return self.autoscaler.update_autoscaling_state()

    def until(self, holds: Any) -> pb.AutoscalingState:
        """Look until it reports such a state."""
        for _ in range(_ROUNDS):
            state = self.look()
            if state is not None and holds(state):
                return state
        raise AssertionError(f"after {_ROUNDS} looks: {state}\n{self.kubernetes.patches}")


def _may_run(wishes: Sequence[Labels], group: str) -> bool:
    return not wishes or any(
        group in label_values(labels[worker_placement.MARKET]) for labels in wishes
    )


def _request(needs: Mapping[str, float], wishes: Sequence[Labels]) -> pb.ResourceRequest:
    request = pb.ResourceRequest(resources_bundle=needs)
    for labels in wishes:
        selector = LabelSelector()
        for key, value in labels.items():
            selector.label_constraints.add(
                label_key=key,
                operator=LabelSelectorOperator.LABEL_OPERATOR_IN,
                label_values=label_values(value),
            )
        request.label_selectors.append(selector)
    return request
