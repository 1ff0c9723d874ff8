"""The part of Kubernetes and of KubeRay's operator that Ray's autoscaler needs, with real Ray nodes
for pods (`pods.py`).

It serves one RayCluster and its pods over HTTPS to who has a client's certificate, takes the
autoscaler's patches, and does what the operator does then: replicas up, a node starts; a name in
workersToDelete, SIGTERM and after the manifest's grace SIGKILL. A pod that ended is replaced. A
request that it does not know gets 404, as a path that is not there. What a real cluster refuses it
can refuse, too: machines of a group, pods of the namespace, requests of the autoscaler.
"""

from __future__ import annotations

import copy
import http.server
import itertools
import json
import ssl
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import trustme

from tests.k8s.pods import HEAD, Machine, Nodes, Pod

NAMESPACE, NAME = "training", "emulated"
_LOOK_S = 0.1
UP = "Ray runtime started"  # so `ray start` says


class Kubernetes:
    """The API server and the operator of one RayCluster, whose pods run on `nodes`."""

    def __init__(self, spec: Mapping[str, Any], nodes: Nodes) -> None:
        metadata = {"name": NAME, "namespace": NAMESPACE, "resourceVersion": "1"}
        self.resource = {"metadata": metadata, "spec": copy.deepcopy(dict(spec))}
        self.pods: dict[str, Pod] = {}
        self.ever: list[Pod] = []  # that ran, the newest last
        self.patches: list[dict[str, Any]] = []
        self.capacity: dict[str, int] = {}  # running pods of a group; the others wait
        self.quota: int | None = None  # workers' pods of the namespace; no more are made
        self.refuses: dict[str, int] = {}  # method: HTTP status
        self._nodes = nodes
        self._numbers = itertools.count()
        self._lock = threading.RLock()
        self._make_pod(HEAD)
        self._run(next(iter(self.pods.values())))

    def workers(self, group: str | None = None) -> list[Pod]:
        """The pods of workers that nobody has deleted."""
        with self._lock:
            there = [pod for pod in self.pods.values() if pod.deleted_at is None]
        return [pod for pod in there if pod.group != HEAD and group in (None, pod.group)]

    def running(self, group: str | None = None) -> list[Pod]:
        return [pod for pod in self.workers(group) if pod.process is not None]

    def preempt(self, pod: Pod) -> None:
        """Take its machine back with notice: the pod is deleted, and has its grace."""
        with self._lock:
            pod.deleted_at = time.monotonic()
            pod.terminate()

    def deleted_by_the_autoscaler(self) -> set[str]:
        values = [p["value"] for p in self.patches if p["path"].endswith("/scaleStrategy")]
        return {name for value in values for name in value["workersToDelete"]}

    # ------------------------------------------------------------------------------ the API server

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        resource, _, query = path.partition("?")
        cluster = f"/apis/ray.io/v1/namespaces/{NAMESPACE}/rayclusters/{NAME}"
        pods = f"/api/v1/namespaces/{NAMESPACE}/pods"
        if method in self.refuses:
            return self.refuses[method], b"{}"
        with self._lock:
            if (method, resource) == ("PATCH", cluster):
                self._patch(json.loads(body))
            if resource == cluster:
                return 200, json.dumps(self.resource).encode()
            if (method, resource, query) == ("GET", pods, f"labelSelector=ray.io/cluster%3D{NAME}"):
                items = [_shown(pod) for pod in self.pods.values()]
                listed = {"metadata": {"resourceVersion": "1"}, "items": items}
                return 200, json.dumps(listed).encode()
        return 404, b"{}"

    def _patch(self, operations: list[dict[str, Any]]) -> None:
        for operation in operations:
            assert operation["op"] == "replace", operation
            *way, last = operation["path"].strip("/").split("/")
            holder: Any = self.resource
            for step in way:
                holder = holder[int(step)] if isinstance(holder, list) else holder[step]
            holder[last] = operation["value"]
            self.patches.append(operation)

    # ------------------------------------------------------------------------------ the operator

    def operate(self) -> None:
        """Look at everything once."""
        with self._lock:
            for pod in list(self.pods.values()):
                self._look_at(pod)
            for group in self.resource["spec"]["workerGroupSpecs"]:
                self._reconcile(group)

    def _look_at(self, pod: Pod) -> None:
        if pod.has_ended():
            del self.pods[pod.name]
        elif pod.deleted_at is not None and time.monotonic() > pod.deleted_at + pod.grace_s:
            pod.was_killed = True
            pod.lose()

    def _reconcile(self, group: dict[str, Any]) -> None:
        name = group["groupName"]
        for doomed in group.get("scaleStrategy", {}).get("workersToDelete", []):
            pod = self.pods.get(doomed)
            if pod is not None and pod.deleted_at is None:
                self.preempt(pod)
        missing = group["replicas"] - len(self.workers(name))
        if self.quota is not None:
            missing = min(missing, self.quota - len(self.workers()))
        for _ in range(missing):
            self._make_pod(name)
        waiting = [pod for pod in self.workers(name) if pod.process is None]
        room = self.capacity.get(name, group["replicas"]) - len(self.running(name))
        for pod in waiting[: max(0, room)]:
            self._run(pod)

    def _make_pod(self, group_name: str) -> None:
        name = f"{self._nodes.name}-{group_name}-{next(self._numbers)}"
        grace_s = self._group(group_name)["template"]["spec"]["terminationGracePeriodSeconds"]
        self.pods[name] = Pod(name, group_name, grace_s)

    def _run(self, pod: Pod) -> None:
        pod.started_at = time.time()
        pod.process = self._nodes.start_node(pod.name, pod.group, self._group(pod.group))
        self.ever.append(pod)

    def _group(self, name: str) -> dict[str, Any]:
        spec = self.resource["spec"]
        workers = {group["groupName"]: group for group in spec["workerGroupSpecs"]}
        return spec["headGroupSpec"] if name == HEAD else workers[name]


class Emulator(Kubernetes):
    """The same with real Ray nodes on this machine, Ray's autoscaler beside them, and HTTPS. Use as
    a context."""

    def __init__(self, spec: Mapping[str, Any], volumes: Mapping[str, Path], code: Path) -> None:
        self.machine = Machine(spec, volumes, code)
        super().__init__(spec, self.machine)
        self._over = threading.Event()
        self._operator = threading.Thread(target=self._operate, daemon=True)

    def __enter__(self) -> Emulator:
        """The head first, alone: Ray gives a node 30 s to come up, and has no switch for that."""
        [head] = self.pods.values()
        while UP not in self.machine.said(head.name):
            if head.has_ended():
                self._run(head)
            time.sleep(_LOOK_S)
        self.machine.start_autoscaler(self._serve(), NAME, NAMESPACE)
        self._operator.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._operator.join()
        self.machine.close()
        self._server.shutdown()
        self._server.server_close()

    def _operate(self) -> None:
        while not self._over.wait(_LOOK_S):
            self.operate()

    def _serve(self) -> dict[str, str]:
        """Start the server; the variables by which the autoscaler finds it."""
        authority, folder = trustme.CA(), self.machine.folder
        client = authority.issue_cert("autoscaler@test")
        authority.cert_pem.write_to_path(str(folder / "ca.pem"))
        client.private_key_and_cert_chain_pem.write_to_path(str(folder / "client.pem"))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert("127.0.0.1").configure_cert(context)
        authority.configure_trust(context)
        context.verify_mode = ssl.CERT_REQUIRED
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        threading.Thread(target=self._server.serve_forever, args=(_LOOK_S,), daemon=True).start()
        return {
            "KUBERNETES_SERVICE_HOST": "127.0.0.1",
            "KUBERNETES_SERVICE_PORT_HTTPS": str(self._server.server_port),
            "RAY_KUBERAY_CA_CERT_PATH": str(folder / "ca.pem"),
            "RAY_KUBERAY_CLIENT_CERT_PATH": str(folder / "client.pem"),
            "RAY_KUBERAY_CLIENT_KEY_PATH": str(folder / "client.pem"),
        }


def _shown(pod: Pod) -> dict[str, Any]:
    labels = {
        "ray.io/cluster": NAME,
        "ray.io/node-type": "head" if pod.group == HEAD else "worker",
        "ray.io/group": pod.group,
    }
    metadata: dict[str, Any] = {"name": pod.name, "labels": labels}
    if pod.deleted_at is not None:
        metadata["deletionTimestamp"] = "now"
    status: dict[str, Any] = {"phase": "Pending"}
    if pod.process is not None:
        status = {"podIP": "127.0.0.1", "containerStatuses": [{"state": {"running": {}}}]}
    return {"metadata": metadata, "status": status, "spec": {"containers": []}}


def _handler(emulator: Emulator) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def _do(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            code, answer = emulator.answer(self.command, self.path, body)
            self.send_response(code)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        do_GET = do_PATCH = _do

        def log_message(self, *_: object) -> None:
            pass

    return Handler
