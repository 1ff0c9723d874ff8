"""Faults that only a cluster has, one after the other in one run, from `kubectl apply` to weights
that are those of one process. Writes benchmarks/results/kubernetes.json.

    KUBE_CLUSTER=… python -m pytest -m slow tests/kubernetes/test_faults.py
"""

import dataclasses
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.k8s.manifests import ROOT, _kubectl, build, ray_object
from tests.kubernetes.server import build_image, for_kuberay, kubectl

PROGRAM = os.environ.get("KUBE_CLUSTER", "")
RESULTS = ROOT / "benchmarks/results/kubernetes.json"
PATIENCE_S = 420.0
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PROGRAM, reason="faults of nodes: set KUBE_CLUSTER"),
]


@dataclasses.dataclass(frozen=True)
class Fault:
    """`do`, and when the run has said `told`, or after so many seconds, `mend`: lines of bash.
    `told` is a regular expression. Then all workers train again."""

    do: str
    told: str = ""
    mend: str = "true"
    after_s: float = 0.0


OFF = "--force --grace-period=0"
DRAIN = "--ignore-daemonsets --delete-emptydir-data --timeout=300s"
FUNCTIONS = """
kubectl() { command %(kubectl)s -n training "$@"; }
cluster() { %(program)s "$@"; }
image() {
  for group in 0 1; do
    kubectl patch raycluster $CLUSTER --type=json -p '[{"op": "replace", "value": "'$1'",
      "path": "/spec/workerGroupSpecs/'$group'/template/spec/containers/0/image"}]'
  done
}
"""
FAULTS = {
    "a node has no power, and its object stays": Fault(
        "cluster kill-node $N",
        told=r"node kn\d has not answered since .* run: kubectl delete node kn\d",
        mend="kubectl delete node $NODE",
    ),
    "a node is added, and one is drained": Fault(
        f"cluster start-node $GONE; kubectl drain $NODE {DRAIN}",
        told="drain",
        mend="kubectl uncordon $NODE",
    ),
    "the head is ended by force while the operator is away": Fault(
        f"cluster kill-operator; kubectl delete pod $HEAD {OFF}",
        mend="cluster start-operator",
        after_s=20,
        told="going on from step",
    ),
    "the head's node is drained": Fault(
        f"kubectl drain $HEAD_NODE {DRAIN}",
        mend="kubectl uncordon $HEAD_NODE",
        after_s=45,
        told="going on from step",
    ),
    "no node takes a pod": Fault(
        f"kubectl cordon kn1 kn2 kn3; kubectl delete pod $WORKER {OFF}",
        told="it has asked for nodes that are not up yet",
        mend="kubectl uncordon kn1 kn2 kn3",
    ),
    "an image cannot be pulled": Fault(
        f"image elastic-dp:gone; kubectl delete pod $WORKER {OFF}",
        told="it has asked for nodes that are not up yet",
        mend="image elastic-dp:cpu; kubectl delete pod --field-selector status.phase=Pending "
        f"-l ray.io/node-type=worker {OFF}",
    ),
    "a quota is exceeded": Fault(
        f"kubectl create quota pods --hard=pods=2; kubectl delete pod $WORKER {OFF}",
        told="not up yet|cannot add nodes",
        mend="kubectl delete quota pods",
    ),
    "a node is cut off for a minute": Fault(
        "cluster cut-node $N",
        mend="cluster mend-node $N",
        after_s=60,
    ),
    "a node has no power, and admin/lost-nodes frees its pods": Fault(
        "kubectl cordon $NODE; kubectl apply -k k8s/admin/lost-nodes; "
        "kubectl set env deployment/lost-nodes MINUTES=0.2; "
        "kubectl rollout status deployment/lost-nodes; cluster kill-node $N",
        mend="kubectl wait --for=delete pod/$WORKER --timeout=400s",
        after_s=30,
    ),
}
done = {}


class Run:
    """The run `digits` on the cluster. `folder` is the volume of all its pods."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def lines(self, name, since):
        path = self.folder / "digits" / f"{name}.jsonl"
        texts = path.read_text().splitlines(keepends=True) if path.exists() else []
        found = [json.loads(text) for text in texts if text.endswith("\n")]
        return [line for line in found if line["time"] >= since]

    def told(self, pattern, since):
        texts = [line["text"] for line in self.lines("events", since) if "text" in line]
        return next((text for text in texts if re.search(pattern, text)), None)

    def full_since(self, since):
        """When all workers trained in a new generation: a step of two that no step of one
        follows."""
        events, steps = self.lines("events", since), self.lines("metrics", since)
        formed = [event["time"] for event in events if event.get("command") == "FormGeneration"]
        after = max([since, *formed, *(step["time"] for step in steps if step["size"] < 2)])
        full = [step["time"] for step in steps if step["size"] == 2 and step["time"] > after]
        return full[0] if full and formed else None


def where():
    """The variables of faults: where the run's pods are. The worker is one apart from the head.
    None while a third worker, which came for one that drained, is idle."""
    running = "--field-selector=status.phase=Running", "-l", "ray.io/node-type", "-o", "json"
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


def shell(lines, names):
    functions = FUNCTIONS % {"kubectl": _kubectl(), "program": PROGRAM}
    return subprocess.Popen(["bash", "-c", functions + lines], cwd=ROOT, env=os.environ | names)


def until(found, what):
    end = time.monotonic() + PATIENCE_S
    while (value := found()) is None:
        assert time.monotonic() < end, what()
        time.sleep(0.5)
    return value


@pytest.fixture(scope="module")
def run(made_cluster, namespace, has_priorities):
    """The run, when both of its workers train."""
    if made_cluster:
        missing = [name for name in ("buildah", "debootstrap") if not shutil.which(name)]
        if missing:
            pytest.skip(f"makes the image: apt-get install {' '.join(missing)}")
        build_image(Path(tempfile.mkdtemp()), ROOT, PROGRAM)
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o777)
    shutil.copy(Path(__file__).with_name("job.py"), folder)
    objects = for_kuberay(build("overlays/cpu-smoke"), has_priorities)
    job = ray_object(objects)["spec"]
    job["entrypoint"] = job["entrypoint"].replace("jobs/digits.py", "/runs/job.py")
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
    secret = "generic", "elastic-dp-auth", f"--from-literal=auth_token={'0123456789abcdef' * 4}"
    kubectl("create", "secret", "-n", "training", *secret)
    code, said = kubectl("apply", "-f", "-", objects=[volume, *objects])
    assert code == 0, said
    try:
        there = Run(folder)
        until(lambda: there.full_since(0), lambda: kubectl("get", "pods", "-n", "training")[1])
        yield there
    finally:
        kubectl("delete", "rayjob", "digits", "-n", "training", "--timeout=200s", seconds=240)
        kubectl("delete", "pvc", "runs", "-n", "training", "--timeout=60s")
        kubectl("delete", "pv", "runs", "--timeout=60s")
        shutil.rmtree(folder)


@pytest.mark.parametrize("name", FAULTS)
def test_run_goes_on_after(run, name):
    fault = FAULTS[name]
    names = until(where, lambda: kubectl("get", "pods", "-n", "training")[1])
    start = time.time()
    first = shell(fault.do, names)

    def state():
        texts = [line["text"] for line in run.lines("events", start) if "text" in line]
        return f"{texts}\n{kubectl('get', 'pods', '-n', 'training', '-o', 'wide')[1]}"

    if fault.after_s:
        time.sleep(fault.after_s)
    else:
        until(lambda: run.told(fault.told, start), state)
    mend = shell(fault.mend, names)
    mend.wait(PATIENCE_S)
    first.wait(PATIENCE_S)
    told = until(lambda: run.told(fault.told, start), state) if fault.told else None
    full = until(lambda: run.full_since(start), state)
    steps = run.lines("metrics", start - 5)
    pauses = [after["time"] - before["time"] for before, after in itertools.pairwise(steps)]
    again = sum(max(0, b["step"] - a["step"] + 1) for b, a in itertools.pairwise(steps))
    done[name] = {
        "done": " ".join(fault.do.split()),
        "mended": fault.mend,
        "told": told,
        "pause_s": round(max(pauses), 1),
        "full_size_s": round(full - start, 1),
        "steps_done_again": again,
    }
    print(name, json.dumps(done[name], indent=1))
    assert again == 0 or "by force" in name or names["WORKERS_ON_NODE"] == "2"


def test_weights_are_those_of_one_process(run, tmp_path):
    (run.folder / "digits-data/finish").touch()

    def ended():
        path = run.folder / "digits/result.json"
        return json.loads(path.read_text()) if path.exists() else None

    result = until(ended, lambda: kubectl("get", "rayjob", "-n", "training")[1])
    command = [sys.executable, ROOT / "tests/kubernetes/job.py", "--local", "--data", tmp_path]
    alone = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert result["weights_sha256"] in alone.stdout
    _, versions = kubectl("version")
    RESULTS.write_text(
        json.dumps(
            {
                "date": time.strftime("%Y-%m-%d"),
                "versions": re.findall(r"(?:Server|Client) Version.*", versions),
                "weights": result["weights_sha256"],
                "faults": done,
            },
            indent=2,
        )
        + "\n"
    )
