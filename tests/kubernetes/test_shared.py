"""A cluster that stays, with its state in Redis, as k8s/README.md has it: its head is ended by
force, and workers train on meanwhile.

    KUBE_CLUSTER=… python -m pytest -m slow tests/kubernetes/test_shared.py
"""

import itertools
import json
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from tests.k8s.manifests import _kubectl, loaded
from tests.kubernetes.runs import RESULTS, prepared, run_alone, until, where
from tests.kubernetes.server import for_kuberay, kubectl

PROGRAM, REDIS = os.environ.get("KUBE_CLUSTER", ""), shutil.which("redis-server")
FOLDER, PASSWORD, EPOCHS = Path(__file__).with_name("shared"), "of-redis", ("--epochs", "40")
SUBMIT = (
    *("ray", "job", "submit", "--no-wait", "--address=http://127.0.0.1:8265", "--"),
    *("elastic-dp", "run", "/runs/job.py", "--set", "name=digits", "--set", "storage_path=/runs"),
    *("--set", "scaling.max_workers=2", "--set", "scaling.virtual_workers=4"),
    *("--set", "checkpoint.every_s=auto", "--", "--data", "/runs/digits-data", *EPOCHS),
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),  # the first test waits for the image
    pytest.mark.skipif(not PROGRAM, reason="gives its image to nodes: set KUBE_CLUSTER"),
    pytest.mark.skipif(not REDIS, reason="needs redis-server"),
]


@pytest.fixture(scope="module")
def redis(made_cluster, namespace, tmp_path_factory):
    """A pod and a service, with the password of the secret `redis`."""
    root = tmp_path_factory.mktemp("redis")
    libraries = subprocess.run(["ldd", REDIS], capture_output=True, text=True, check=True).stdout
    for path in [REDIS, *(word for word in libraries.split() if word.startswith("/"))]:
        (root / path[1:]).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, root / path[1:])
    subprocess.run([PROGRAM, "image", "redis:local", root, "--user", "1000:1000"], check=True)
    labels = {"app.kubernetes.io/name": "redis"}
    secured = {
        "runAsNonRoot": True,
        "runAsUser": 1000,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    container = {
        "name": "redis",
        "image": "redis:local",
        "command": [REDIS, "--requirepass", PASSWORD, "--save", "", "--protected-mode", "no"],
        "securityContext": secured,
    }
    pod, service = (
        {"apiVersion": "v1", "kind": kind, "metadata": {"name": "redis", "namespace": "training"}}
        for kind in ("Pod", "Service")
    )
    pod["metadata"]["labels"] = labels
    pod["spec"] = {"containers": [container]}
    service["spec"] = {"selector": labels, "ports": [{"port": 6379}]}
    secret = "generic", "redis", f"--from-literal=password={PASSWORD}"
    kubectl("create", "secret", "-n", "training", *secret)
    code, said = kubectl("apply", "-f", "-", objects=[pod, service])
    assert code == 0, said


@pytest.fixture
def run(image, redis, has_priorities):
    built = subprocess.run([_kubectl(), "kustomize", FOLDER], capture_output=True, check=True)
    objects = for_kuberay(loaded(built.stdout), has_priorities)
    with prepared() as there:
        code, said = kubectl("apply", "-f", "-", objects=objects)
        assert code == 0, said
        try:
            yield there
        finally:
            kubectl("delete", "-f", "-", "--timeout=200s", objects=objects, seconds=240)


def pods():
    return kubectl("get", "pods", "-n", "training", "-o", "wide")[1]


def submit():
    """Submit the job in the head, as soon as there is one that answers."""

    def submitted():
        label = "ray.io/node-type=head", "--field-selector=status.phase=Running", "-o", "name"
        name = kubectl("get", "pods", "-n", "training", "-l", *label)[1].strip()
        words = "exec", "-n", "training", name, "-c", "ray-head", "--", *SUBMIT
        return True if name and kubectl(*words)[0] == 0 else None

    until(submitted, pods)


def test_workers_train_on_while_the_head_is_away(run, tmp_path):
    submit()
    until(lambda: run.full_since(0), pods)
    head, start = until(where, pods)["HEAD"], time.time()
    kubectl("delete", "pod", "-n", "training", head, "--force", "--grace-period=0")
    told = until(lambda: run.told("took over", start), pods)
    submit()  # the driver ended with its head
    result = run.finish(pods)
    steps = run.lines("metrics", 0)
    assert all(after["step"] == before["step"] + 1 for before, after in itertools.pairwise(steps))
    assert result["workers_lost"] == 0
    assert result["weights_sha256"] in run_alone(tmp_path, *EPOCHS)
    pauses = [after["time"] - before["time"] for before, after in itertools.pairwise(steps)]
    results = json.loads(RESULTS.read_text())
    results["faults"]["the head of a cluster that stays is ended by force (Redis)"] = {
        "done": "kubectl delete pod $HEAD --force --grace-period=0",
        "mended": "ray job submit, again",
        "told": told,
        "pause_s": round(max(pauses), 1),
        "full_size_s": None,
        "steps_done_again": 0,
    }
    RESULTS.write_text(json.dumps(results, indent=2) + "\n")
