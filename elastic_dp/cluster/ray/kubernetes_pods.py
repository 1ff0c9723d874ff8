"""Which pods of this Ray cluster are on nodes that do not answer.

Kubernetes keeps the pods of a lost node for as long as it keeps the node. KubeRay counts them, so
none is replaced. Clouds delete such nodes; on premises somebody must.
"""

from __future__ import annotations

import json
import os
import ssl
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

_ACCOUNT = Path(
    "/var/run/secrets/kubernetes.io/serviceaccount"
)  # KubeRay lets the head's list pods
_TIMEOUT_S = 5.0


def pods_of_this_cluster() -> Sequence[Mapping[str, Any]]:
    """Return what the Kubernetes API has of them; nothing on a node without an account there, as
    those of workers. Raises OSError if the API does not answer."""
    cluster = os.environ.get("RAY_CLUSTER_NAME")
    if not cluster or not (_ACCOUNT / "token").exists():
        return ()
    url = (
        f"https://kubernetes.default.svc/api/v1/namespaces/{(_ACCOUNT / 'namespace').read_text()}"
        f"/pods?labelSelector=ray.io%2Fcluster%3D{cluster}"
    )
    token = (_ACCOUNT / "token").read_text()  # it is replaced now and then
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}),
        urllib.request.HTTPSHandler(
            context=ssl.create_default_context(cafile=str(_ACCOUNT / "ca.crt"))
        ),
    )
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
    with opener.open(request, timeout=_TIMEOUT_S) as answer:
        pods: list[Mapping[str, Any]] = json.load(answer)["items"]
    return pods


def on_lost_nodes(pods: Sequence[Mapping[str, Any]]) -> str:
    """Return which of the pods are on nodes that do not answer, since when, and what helps; empty
    if none is."""
    lost = [(pod["spec"]["nodeName"], since, pod) for pod in pods for since in _lost_since(pod)]
    sentences = []
    for node in sorted({node for node, _, _ in lost}):
        names = sorted(pod["metadata"]["name"] for where, _, pod in lost if where == node)
        since = min(since for where, since, _ in lost if where == node)
        sentences.append(
            f"node {node} has not answered since {since:%H:%M:%S} UTC, and Kubernetes replaces "
            f"{', '.join(names)} only when the node is deleted. If it is off, run: kubectl delete "
            f"node {node}. If it will be back, run: kubectl taint node {node} "
            "node.kubernetes.io/out-of-service=off:NoExecute"
        )
    return "; ".join(sentences)


def _lost_since(pod: Mapping[str, Any]) -> Iterator[datetime]:
    """Yield when the node of a pod fell silent, if it did.

    Kubernetes then sets the pod's condition Ready to False, and leaves those that the node has
    reported itself.
    """
    conditions = {each["type"]: each for each in pod["status"].get("conditions", ())}
    ready, reported = conditions.get("Ready"), conditions.get("ContainersReady")
    if ready and reported and (ready["status"], reported["status"]) == ("False", "True"):
        yield datetime.fromisoformat(ready["lastTransitionTime"]).astimezone(UTC)
