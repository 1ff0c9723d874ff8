"""The manifests of `k8s/` as `kubectl` makes them, and the places in them that tests look at.

Each folder is built once. `kubectl` is the machine's own, or the one that `pip install
elastic_dp[dev]` brings.
"""

import copy
import functools
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.k8s.filled import filled

ROOT = Path(__file__).parents[2]
K8S = ROOT / "k8s"
RUNS = (
    *("overlays/cpu-smoke", "overlays/eks-spot", "overlays/gke-spot", "overlays/aks-spot"),
    *("overlays/eks-efa", "overlays/gke-gpudirect", "overlays/minio", "overlays/nfs"),
)
CLUSTERS = ("overlays/eks-shared", "overlays/gke-shared")
OVERLAYS = (*RUNS, *CLUSTERS)
ON_WHOLE_MACHINES = ("overlays/eks-efa", "overlays/gke-gpudirect")
SHARED = (
    *("namespaces/base", "namespaces/eks", "namespaces/gke", "namespaces/aks"),
    *("namespaces/gke-gpudirect", "admin/priority", "admin/lost-nodes"),
    *("prepull/aks", "prepull/eks", "prepull/gke", "monitoring", "admin/kueue"),
)


def build(folder: str) -> list[dict[str, Any]]:
    """The objects of one kustomization, yours to change."""
    return copy.deepcopy(_built(folder))


@functools.cache
def _built(folder: str) -> list[dict[str, Any]]:
    made = subprocess.run(
        [_kubectl(), "kustomize", str(filled() / folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    assert not made.stderr, made.stderr  # a deprecated field of a kustomization
    return loaded(made.stdout)


def loaded(text: str) -> list[dict[str, Any]]:
    """What `kubectl` printed. libyaml reads it ten times as fast as Python."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return [thing for thing in yaml.load_all(text, loader) if thing]


def _kubectl() -> str:
    found = shutil.which("kubectl") or shutil.which("kubectl", path=Path(sys.executable).parent)
    assert found, "no kubectl: pip install -e '.[dev]'"
    return found


def of_kind(objects: list[dict[str, Any]], *kinds: str) -> list[dict[str, Any]]:
    return [thing for thing in objects if thing["kind"] in kinds]


def ray_object(objects: list[dict[str, Any]]) -> dict[str, Any]:
    """The RayJob, or the RayCluster where a cluster stays."""
    [found] = of_kind(objects, "RayJob", "RayCluster")
    return found


def cluster(objects: list[dict[str, Any]]) -> dict[str, Any]:
    """What KubeRay makes the RayCluster from."""
    spec = ray_object(objects)["spec"]
    return spec.get("rayClusterSpec", spec)


def groups(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The worker groups by name."""
    return {group["groupName"]: group for group in cluster(objects)["workerGroupSpecs"]}


def templates(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The pod templates of the cluster: "head" and each group's."""
    head = {"head": cluster(objects)["headGroupSpec"]["template"]}
    return head | {name: group["template"] for name, group in groups(objects).items()}


def containers(objects: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """All containers, with where they are. The autoscaler's is one that KubeRay makes of its
    options."""
    for name, template in templates(objects).items():
        for container in template["spec"]["containers"]:
            yield name, container
    yield "autoscaler", cluster(objects)["autoscalerOptions"]


def environment(container: dict[str, Any]) -> dict[str, str]:
    return {variable["name"]: variable.get("value", "") for variable in container.get("env", [])}


def seconds(text: str) -> float:
    return float(text)
