"""One params.env for each kind of cluster: each value reaches every place that needs it and no
other, and a value that was not filled in is refused by `kubectl kustomize` itself.
"""

import functools
import re
import shlex
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.k8s.filled import K8S, copy_filled, params
from tests.k8s.manifests import _kubectl, build, loaded, ray_object

HEAD = "headGroupSpec.template.spec.containers.0."
WORKERS = "workerGroupSpecs.N."
WORKER = WORKERS + "template.spec.containers.0."
# Where a value goes in a run, below what becomes the RayCluster; "entrypoint" is the RayJob's.
PLACES = {
    "image": {HEAD + "image", WORKER + "image"},
    "storage_path": {"entrypoint"},
    "data_url": {"entrypoint"},
    "script": {"entrypoint"},
    "max_workers": {"entrypoint"},
    "virtual_workers": {"entrypoint"},
    "arguments": {"entrypoint"},
    "retries": {"backoffLimit"},
    "max_pods": {WORKERS + "maxReplicas"},
    "worker_cpu": {WORKER + "resources.requests.cpu"},
    "worker_memory": {WORKER + f"resources.{of}.memory" for of in ("requests", "limits")},
    "endpoint": {HEAD + "env.AWS_ENDPOINT_URL", WORKER + "env.AWS_ENDPOINT_URL"},
    "proxy": {HEAD + "env.HTTPS_PROXY", WORKER + "env.HTTPS_PROXY"},
    "storage_class": {"storageClassName"},
    "storage_size": {"resources.requests.storage"},
    "gpus_per_pod": {WORKER + f"resources.{of}.nvidia.com/gpu" for of in ("requests", "limits")},
}
GPU_KIND = {
    "gke": "cloud.google.com/gke-accelerator",
    "eks": "karpenter.k8s.aws/instance-gpu-name",
    "aks": "node.kubernetes.io/instance-type",
}
IN_THE_NAMESPACE = {
    "gke": ("service_account", "iam.gke.io/gcp-service-account"),
    "eks": ("role_arn", "eks.amazonaws.com/role-arn"),
    "aks": ("client_id", "azure.workload.identity/client-id"),
}
# None is part of another, so that a place shows whose value it has.
OTHER_VALUES = {
    "image": "other.example.org/team/elastic-dp:2",
    "storage_path": "s3://other@example/runs?region=eu",
    "data_url": "s3://other@example/shards",
    "client_id": "a-b-c-d-e",
    "machine_type": "Standard_other",
    "endpoint": "https://other:9000",
    "proxy": "http://other:3128",
    "storage_class": "elsewhere",
    "storage_size": "7Gi",
    "service_account": "service@example.org",
    "role_arn": "arn:aws:iam::444455556666:role/other",
    "arguments": "--set config.lr=0.1 -- --flag 'two words'",
    "script": "jobs/other.py",
    "name": "other",
    "engineers": "engineers@example.org",
    "operators": "operators@example.org",
    "gpu_kind": "another",
    "worker_memory": "1047Mi",
    "max_workers": "1041",
    "virtual_workers": "1042",
    "retries": "1043",
    "max_pods": "1044",
    "worker_cpu": "1045",
    "gpus_per_pod": "1046",
}


def kustomization(folder: str) -> dict[str, Any]:
    return yaml.safe_load((K8S / folder / "kustomization.yaml").read_text())


@functools.cache
def cloud_of(folder: str) -> str | None:
    """Return the cloud whose params.env a kustomization reads."""
    for component in kustomization(folder).get("components", []):
        if found := re.fullmatch(r"\.\./\.\./params/(\w+)", component):
            return found[1]
    return None


@functools.cache
def overridden(folder: str) -> set[str]:
    """What an overlay's `run/` and its components say over the params.env."""
    keys = set()
    for component in kustomization(folder)["components"]:
        path = (K8S / folder / component).resolve().relative_to(K8S)
        for generator in kustomization(str(path)).get("configMapGenerator", []):
            if generator.get("behavior") == "merge":
                assert generator["name"] == "params"
                keys |= {literal.partition("=")[0] for literal in generator["literals"]}
    return keys


OVERLAYS = [f"overlays/{path.name}" for path in sorted((K8S / "overlays").iterdir())]
READERS = [
    folder
    for path in sorted(K8S.glob("*/*/kustomization.yaml"))
    if cloud_of(folder := str(path.parent.relative_to(K8S)))
]
CASES = [
    pytest.param(folder, key, id=f"{folder}-{key}")
    for folder in OVERLAYS
    for key in params(cloud_of(folder))
    if key not in overridden(folder)
]


def rendered(k8s, folder: str) -> subprocess.CompletedProcess[str]:
    command = [_kubectl(), "kustomize", str(k8s / folder)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def with_values(tmp_path, folder: str, values: dict[str, str]) -> list[dict[str, Any]]:
    k8s = copy_filled(tmp_path / "k8s", {cloud_of(folder): values})
    made = rendered(k8s, folder)
    assert made.returncode == 0, made.stderr
    return loaded(made.stdout)


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(value, dict | list):
        yield path, value
        return
    if path.endswith(".env"):
        value = {variable["name"]: variable.get("value", "") for variable in value}
    for key, below in value.items() if isinstance(value, dict) else enumerate(value):
        yield from leaves(below, f"{path}.{key}" if path else str(key))


def by_place(objects: list[dict[str, Any]]) -> dict[str, Any]:
    """Every value by its place: "RayJob/0 spec.entrypoint". Objects of one kind are told apart by
    their order."""
    count: dict[str, int] = {}
    found = {}
    for thing in objects:
        kind = thing["kind"]
        count[kind] = count.get(kind, -1) + 1
        found |= {f"{kind}/{count[kind]} {path}": leaf for path, leaf in leaves(thing)}
    return found


def changed(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> dict[str, Any]:
    old, new = by_place(before), by_place(after)
    assert set(old) == set(new)
    return {place: new[place] for place in new if new[place] != old[place]}


def plain(place: str) -> str:
    """The place in a run, whichever group it is of and whether a RayJob or a RayCluster has it."""
    path = place.partition(" ")[2].removeprefix("spec.").removeprefix("rayClusterSpec.")
    return re.sub(r"workerGroupSpecs\.\d+", "workerGroupSpecs.N", path)


@functools.cache
def with_other_values(folder: str) -> list[dict[str, Any]]:
    """The objects of an overlay for which every value of its params.env is another."""
    cloud = cloud_of(folder)
    with tempfile.TemporaryDirectory() as made:
        return with_values(Path(made), folder, {key: OTHER_VALUES[key] for key in params(cloud)})


@functools.cache
def has_a_job(folder: str) -> bool:
    return ray_object(build(folder))["kind"] == "RayJob"


def places_of(folder: str, key: str) -> set[str]:
    cloud = cloud_of(folder)
    if key in ("engineers", "operators", IN_THE_NAMESPACE.get(cloud, [""])[0]):
        return set()  # the namespace's, below
    places = PLACES.get(key) or {WORKERS + f"template.spec.nodeSelector.{GPU_KIND[cloud]}"}
    return places if has_a_job(folder) else places - {"entrypoint", "backoffLimit"}


@pytest.mark.parametrize("folder", OVERLAYS)
def test_params_change_nothing_but_the_places_of_their_values(folder):
    keys = [case.values[1] for case in CASES if case.values[0] == folder]
    places = set().union(*(places_of(folder, key) for key in keys if key != "name"))
    differs = changed(build(folder), with_other_values(folder))
    of_the_name = {
        place for place, leaf in differs.items() if re.fullmatch("other(-.*)?", str(leaf))
    }
    assert {plain(place) for place in differs.keys() - of_the_name} == places


@pytest.mark.parametrize("folder", [f for f in OVERLAYS if f.endswith("-spot")])
def test_params_entrypoint_has_each_value_under_its_own_option(folder):
    values = OTHER_VALUES
    options = (
        f"name={values['name']}",
        f"storage_path={values['storage_path']}",
        f"scaling.max_workers={values['max_workers']}",
        f"scaling.virtual_workers={values['virtual_workers']}",
        f"data.url={values['data_url']}",
        "scaling.resources_per_worker.GPU=1",
        "config.lr=0.1",
    )
    assert shlex.split(ray_object(with_other_values(folder))["spec"]["entrypoint"]) == [
        *("elastic-dp", "run", values["script"]),
        *(word for option in options for word in ("--set", option)),
        *("--", "--flag", "two words"),
    ]


@pytest.mark.parametrize("cloud", IN_THE_NAMESPACE)
def test_params_namespace_has_the_clouds_identity_and_groups(cloud, tmp_path):
    key, annotation = IN_THE_NAMESPACE[cloud]
    folder = f"namespaces/{cloud}"
    objects = {
        key: {"ServiceAccount/0", "ServiceAccount/1"},
        "engineers": {"RoleBinding/0"},
        "operators": {"RoleBinding/1"},
    }
    values = {name: OTHER_VALUES[name] for name in objects}
    differs = changed(build(folder), with_values(tmp_path, folder, values))
    assert set(differs.values()) == set(values.values())
    for name, of_name in objects.items():
        places = [place for place, value in differs.items() if value == values[name]]
        assert {place.partition(" ")[0] for place in places} == of_name
        if name == key:
            assert all(place.endswith(f"annotations.{annotation}") for place in places)


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
