"""One params.env for each kind of cluster: its values reach the command of a run, and a value that
was not filled in is refused by `kubectl kustomize` itself.
"""

import functools
import re
import shlex
import subprocess
from typing import Any

import pytest
import yaml

from tests.k8s.filled import K8S, copy_filled
from tests.k8s.manifests import _kubectl, containers, loaded, ray_object


def kustomization(folder: str) -> dict[str, Any]:
    return yaml.safe_load((K8S / folder / "kustomization.yaml").read_text())


@functools.cache
def cloud_of(folder: str) -> str | None:
    """Return the cloud whose params.env a kustomization reads."""
    for component in kustomization(folder).get("components", []):
        if found := re.fullmatch(r"\.\./\.\./params/(\w+)", component):
            return found[1]
    return None


READERS = [
    folder
    for path in sorted(K8S.glob("*/*/kustomization.yaml"))
    if cloud_of(folder := str(path.parent.relative_to(K8S)))
]


def rendered(k8s, folder: str) -> subprocess.CompletedProcess[str]:
    command = [_kubectl(), "kustomize", str(k8s / folder)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


VALUES = {
    "name": "other",
    "image": "other.example.org/team/elastic-dp:2",
    "storage_path": "s3://other@example/runs?region=eu",
    "data_url": "s3://other@example/shards",
    "arguments": "--set config.lr=0.1 -- --flag 'two words'",
    "script": "jobs/other.py",
    "max_workers": "1041",
    "virtual_workers": "1042",
}


@pytest.mark.parametrize("cloud", ["gke", "eks", "aks"])
def test_params_of_a_run_are_under_their_own_options(cloud, tmp_path):
    made = rendered(copy_filled(tmp_path / "k8s", {cloud: VALUES}), f"overlays/{cloud}-spot")
    objects = loaded(made.stdout)
    options = (
        f"name={VALUES['name']}",
        f"storage_path={VALUES['storage_path']}",
        f"scaling.max_workers={VALUES['max_workers']}",
        f"scaling.virtual_workers={VALUES['virtual_workers']}",
        f"data.url={VALUES['data_url']}",
        "scaling.resources_per_worker.GPU=1",
        "config.lr=0.1",
    )
    assert shlex.split(ray_object(objects)["spec"]["entrypoint"]) == [
        *("elastic-dp", "run", VALUES["script"]),
        *(word for option in options for word in ("--set", option)),
        *("--", "--flag", "two words"),
    ]
    images = {c["image"] for where, c in containers(objects) if where != "autoscaler"}
    assert images == {VALUES["image"]}


def refused(k8s, folder: str) -> str:
    made = rendered(k8s, folder)
    assert made.returncode != 0 and not made.stdout
    return made.stderr


@pytest.mark.parametrize("folder", [f for f in READERS if cloud_of(f) != "kind"])
def test_params_as_shipped_are_refused_by_name(folder):
    message = refused(K8S, folder)
    assert re.search(r"params/checks/\w+-must-[\w-]+'", message), message


@pytest.mark.parametrize(
    ("cloud", "key", "wrong", "said"),
    [
        ("gke", "image", "", "image-must-have-registry-and-tag"),
        ("eks", "image", "elastic-dp:0.1.0-cuda", "image-must-have-registry-and-tag"),
        ("aks", "image", "registry.example.com/elastic-dp", "image-must-have-registry-and-tag"),
        ("gke", "storage_path", "", "storage_path-must-be-a-url"),
        ("eks", "storage_path", "/tmp/runs", "storage_path-must-be-a-url"),
        ("eks", "data_url", "", "data_url-must-be-a-url"),
    ],
)
def test_params_wrong_value_is_refused_by_name(cloud, key, wrong, said, tmp_path):
    k8s = copy_filled(tmp_path / "k8s", {cloud: {key: wrong}})
    assert said in refused(k8s, f"overlays/{cloud}-spot")
