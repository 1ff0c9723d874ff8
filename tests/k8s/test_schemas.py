"""Every kustomization is built by kubectl, and each object in it has only fields that its kind has.

The schemas are KubeRay's 1.7.0, Kueue's 0.19.2, the Prometheus operator's 0.93.0 and Kubernetes'
1.37; `schemas/README.md` says from where. What CRDs cannot say, and KubeRay's operator refuses all
the same, is here too.
"""

import functools
import json

import jsonschema
import pytest

from tests.k8s.manifests import K8S, OVERLAYS, SHARED, build, cluster, groups, ray_object
from tests.k8s.slim_schemas import SCHEMAS

LONGEST_NAME = 47  # of a RayJob; its RayCluster's has 6 characters more


@pytest.mark.parametrize("folder", [*OVERLAYS, *SHARED])
def test_each_object_is_one_of_its_kind(folder):
    for thing in build(folder):
        name = thing["metadata"]["name"]
        errors = [
            f"{thing['kind']} {name}: {'/'.join(map(str, error.path))}: {error.message[:200]}"
            for error in _validator(thing["apiVersion"], thing["kind"]).iter_errors(thing)
        ]
        assert not errors, "\n".join(errors)


def test_a_misspelt_field_is_refused():
    job = ray_object(build("overlays/eks-spot"))
    job["spec"]["backofLimit"] = job["spec"].pop("backoffLimit")
    head = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    head["terminationGracePeriod"] = 1
    said = " ".join(e.message for e in _validator(job["apiVersion"], "RayJob").iter_errors(job))
    assert "'backofLimit' was unexpected" in said
    assert "'terminationGracePeriod' was unexpected" in said


def test_each_kustomization_is_built_by_a_test():
    made = {str(path.parent.relative_to(K8S)) for path in K8S.rglob("kustomization.yaml")}
    parts = {p for p in made if p.startswith(("components/", "params/")) or p.endswith("/run")}
    assert made - parts - {"base", "prepull/base"} == {*OVERLAYS, *SHARED}


def test_each_component_is_in_an_overlay():
    used = "".join((K8S / folder / "kustomization.yaml").read_text() for folder in OVERLAYS)
    for component in (K8S / "components").iterdir():
        assert f"components/{component.name}\n" in used, component


@pytest.mark.parametrize("folder", OVERLAYS)
def test_overlays_have_nothing_that_the_operator_refuses(folder):
    objects = build(folder)
    thing, spec = ray_object(objects), cluster(objects)
    assert len(thing["metadata"]["name"]) <= LONGEST_NAME
    assert spec["authOptions"]["mode"] == "token" and spec["rayVersion"]
    for group in (spec["headGroupSpec"], *groups(objects).values()):
        assert "labels" not in group["rayStartParams"]
        assert "restartPolicy" not in group["template"]["spec"]  # the autoscaler v2 sets Never
        assert group["template"]["spec"]["containers"][0]["name"].startswith("ray-")
    fault_tolerance = spec.get("gcsFaultToleranceOptions", {})
    if fault_tolerance.get("backend") == "rocksdb":
        assert not {name for name in fault_tolerance if name.startswith("redis")}
    if thing["kind"] == "RayJob":
        job = thing["spec"]
        assert job["shutdownAfterJobFinishes"] and "deletionStrategy" not in job
        assert job["backoffLimit"] > 0 and "clusterSelector" not in job


@functools.cache
def _validator(api_version: str, kind: str) -> jsonschema.Draft7Validator:
    group, _, version = api_version.rpartition("/")
    path = SCHEMAS / f"{kind}.{group}.json"
    if path.exists():
        return jsonschema.Draft7Validator(json.loads(path.read_text()))
    core = json.loads((SCHEMAS / "kubernetes.json").read_text())
    short = group.split(".")[0]
    name = "-".join(part for part in (kind.lower(), short, version) if part)
    assert name in core["$defs"], f"no schema of {api_version} {kind}"
    return jsonschema.Draft202012Validator(core | {"$ref": f"#/$defs/{name}"})
