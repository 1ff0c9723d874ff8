"""A run on the cluster, as its files and `kubectl` show it."""

import contextlib
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path

from tests.k8s.manifests import ROOT
from tests.kubernetes.server import kubectl

PATIENCE_S, TOKEN = 420.0, "0123456789abcdef" * 4
RESULTS = ROOT / "benchmarks/results/kubernetes.json"
JOB = Path(__file__).with_name("job.py")


class Run:
    """The run `digits` on the cluster. `folder` is the volume of all its pods."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pictured = []  # (begin, all workers again, fault)
        self.kubernetes = []  # its events until all workers were there again

    def timeline(self):
        """What Kubernetes did with the pods, and how many workers trained, during the first faults:
        seconds since the first one."""
        zero, end = self.pictured[0][0] - 20, self.pictured[-1][1] + 20
        pods = {}
        for event in self.kubernetes:
            at = datetime.fromisoformat(event["firstTimestamp"] or event["eventTime"]).timestamp()
            reason, about, said = event["reason"], event["involvedObject"], event["message"]
            deleted = reason in ("DeletedWorkerPod", "DeletedHeadPod")
            name = re.search(r"training/([\w-]+)", said)[1] if deleted else about["name"]
            pod = pods.setdefault(name, {"name": name})
            if reason == "Scheduled":
                pod |= {"from": at, "node": said.split()[-1]}
            elif reason == "Started" and "{ray-" in about["fieldPath"]:
                pod["ready"] = at
            elif deleted or reason in ("Killing", "NodeNotReady"):
                pod["ending"] = min(at, pod.get("ending", at))
        sizes = []
        steps = [step for step in self.lines("metrics", zero) if step["time"] < end]
        for before, after in itertools.pairwise(steps):
            if after["time"] - before["time"] > 2:
                sizes.append((before["time"], 0))
            if not sizes or sizes[-1][1] != after["size"]:
                sizes.append((after["time"], after["size"]))

        def relative(value):
            return round(value - zero, 1) if isinstance(value, float) else value

        seen = [pod for pod in pods.values() if "from" in pod and pod["from"] < end]
        return {
            "end": relative(end),
            "faults": [[relative(field) for field in fault] for fault in self.pictured],
            "workers": [[relative(at), size] for at, size in sizes],
            "pods": [
                {key: relative(value) for key, value in pod.items()}
                for pod in sorted(seen, key=lambda pod: pod["from"])
            ],
        }

    def lines(self, name, since):
        path = self.folder / "digits" / f"{name}.jsonl"
        texts = path.read_text().splitlines(keepends=True) if path.exists() else []
        found = [json.loads(text) for text in texts if text.endswith("\n")]
        return [line for line in found if line["time"] >= since]

    def told(self, pattern, since):
        texts = [line["text"] for line in self.lines("events", since) if "text" in line]
        return next((text for text in texts if re.search(pattern, text)), None)

    def full_since(self, since, new_generation=True):
        """When all workers trained, in a new generation: a step of two that no step of one
        follows."""
        events, steps = self.lines("events", since), self.lines("metrics", since)
        formed = [event["time"] for event in events if event.get("command") == "FormGeneration"]
        after = max([since, *formed, *(step["time"] for step in steps if step["size"] < 2)])
        full = [step["time"] for step in steps if step["size"] == 2 and step["time"] > after]
        return full[0] if full and (formed or not new_generation) else None

    def finish(self, what):
        """The result of the run, at full speed from here on."""
        (self.folder / "digits-data/finish").touch()
        path = self.folder / "digits/result.json"
        return until(lambda: json.loads(path.read_text()) if path.exists() else None, what)


def run_alone(folder, *words):
    """What the job prints in one process."""
    command = [sys.executable, JOB, "--local", "--data", folder, *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout


@contextlib.contextmanager
def prepared():
    """What a run needs: its secret, and its volume with the job in it."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o777)
    shutil.copy(JOB, folder)
    volume = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": "runs"},
        "spec": {
            "capacity": {"storage": "2Gi"},
            "accessModes": ["ReadWriteOnce"],
            "hostPath": {"path": str(folder)},
            "claimRef": {"namespace": "training", "name": "runs"},
        },
    }
    secret = "generic", "elastic-dp-auth", f"--from-literal=auth_token={TOKEN}"
    kubectl("create", "secret", "-n", "training", *secret)
    code, said = kubectl("apply", "-f", "-", objects=[volume])
    assert code == 0, said
    try:
        yield Run(folder)
    finally:
        kubectl("delete", "pv", "runs", "--timeout=60s")
        shutil.rmtree(folder)


def where():
    """The variables of faults: where the run's pods are. The worker is one apart from the head.
    None while a third worker, which came for one that drained, is idle."""
    label = "ray.io/node-type,app.kubernetes.io/instance=digits"
    running = "--field-selector=status.phase=Running", "-l", label, "-o", "json"
    code, said = kubectl("get", "pods", "-n", "training", *running)
    assert code == 0, said
    pods = [pod for pod in json.loads(said)["items"] if "deletionTimestamp" not in pod["metadata"]]
    labels = [pod["metadata"]["labels"] for pod in pods]
    places = [(pod["metadata"]["name"], pod["spec"]["nodeName"]) for pod in pods]
    kinds = [has["ray.io/node-type"] for has in labels]
    if sorted(kinds) != ["head", "worker", "worker"]:
        return None
    at = kinds.index("head")
    head, head_node = places.pop(at)
    worker, node = min(places, key=lambda place: place[1] == head_node)
    _, nodes = kubectl("get", "nodes", "-o", "name")
    return {
        **{"HEAD": head, "HEAD_NODE": head_node, "WORKER": worker, "NODE": node, "N": node[2:]},
        "GONE": next((n for n in "123" if f"kn{n}\n" not in nodes), ""),
        "CLUSTER": labels[at]["ray.io/cluster"],
        "WORKERS_ON_NODE": str(sum(place[1] == node for place in places)),
        "STATE": str(Path(os.environ["KUBECONFIG"]).parent),
    }


def until(found, what):
    end = time.monotonic() + PATIENCE_S
    while (value := found()) is None:
        assert time.monotonic() < end, what()
        time.sleep(0.5)
    return value
