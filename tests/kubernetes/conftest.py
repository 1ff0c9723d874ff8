"""A Kubernetes for these tests: that of KUBECONFIG, or a new one of three nodes that the program
KUBE_CLUSTER makes (`up`, `down`, `image NAME ROOT`, `kill-node N`, `start-node N`, `kill-operator`
and so on). It must have KubeRay's CRDs, and no namespace "training"."""

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.k8s.manifests import ROOT, build
from tests.kubernetes.server import build_image, kubectl


@pytest.fixture(scope="session")
def made_cluster():
    """Whether these tests made the cluster. It is gone in the end."""
    if "KUBECONFIG" in os.environ:
        yield False
        return
    program = os.environ.get("KUBE_CLUSTER")
    if not program:
        pytest.skip("no Kubernetes: set KUBECONFIG, or KUBE_CLUSTER to a program that makes one")
    made = subprocess.run([program, "up"], capture_output=True, text=True)
    try:
        if made.returncode:
            pytest.skip(f"{program} up: {made.stderr[-500:]}")
        os.environ["KUBECONFIG"] = made.stdout.split()[-1]
        yield True
    finally:
        os.environ.pop("KUBECONFIG", None)
        subprocess.run([program, "down"], check=True)


@pytest.fixture(scope="session")
def image(made_cluster):
    """The image elastic-dp:cpu is on all nodes."""
    if made_cluster:
        missing = [name for name in ("buildah", "debootstrap") if not shutil.which(name)]
        if missing:
            pytest.skip(f"makes the image: apt-get install {' '.join(missing)}")
        build_image(Path(tempfile.mkdtemp()), ROOT, os.environ["KUBE_CLUSTER"])


@pytest.fixture(scope="module", autouse=True)
def namespace(made_cluster):
    """What the platform team applies once. It is deleted in the end."""
    if kubectl("get", "namespace", "training")[0] == 0:
        pytest.fail("the cluster has a namespace 'training' already: these tests would delete it")
    try:
        for folder in ("namespaces/base", "admin/priority"):
            code, said = kubectl("apply", "-f", "-", objects=build(folder))
            assert code == 0, said
        yield
    finally:
        kubectl("delete", "-f", "-", objects=build("admin/priority"))
        kubectl("delete", "namespace", "training", "--timeout=200s", seconds=240)


@pytest.fixture(scope="module")
def has_priorities():
    """Whether KubeRay is 1.7. An older one has no `priority` of worker groups."""
    _, said = kubectl("get", "crd", "rayclusters.ray.io", "-o", "json")
    versions = {version["name"]: version for version in json.loads(said)["spec"]["versions"]}
    fields = versions["v1"]["schema"]["openAPIV3Schema"]["properties"]
    groups = fields["spec"]["properties"]["workerGroupSpecs"]["items"]["properties"]
    return "priority" in groups
