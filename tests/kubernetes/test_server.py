"""The manifests on a real Kubernetes: its server accepts them, its PodSecurity the pods, and each
group may do what its role says.

    KUBECONFIG=… python -m pytest tests/kubernetes
"""

import pytest

from tests.k8s.manifests import CLUSTERS, RUNS, build, of_kind, templates
from tests.kubernetes.server import for_kuberay, kubectl


@pytest.mark.parametrize("overlay", [*RUNS, *CLUSTERS])
def test_server_accepts_each_overlay_and_its_pods(overlay, has_priorities):
    objects = for_kuberay(build(overlay), has_priorities)
    if not has_priorities and overlay == "overlays/gke-shared":
        pytest.skip("KubeRay before 1.7 has no spec.gcsFaultToleranceOptions.backend: rocksdb")
    kind = "gke-gpudirect" if overlay == "overlays/gke-gpudirect" else "base"
    code, said = kubectl(
        "apply", "-f", "-", objects=of_kind(build(f"namespaces/{kind}"), "Namespace")
    )
    assert code == 0, said
    pods = [
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": f"try-{name}", "namespace": "training"},
            "spec": template["spec"],
        }
        for name, template in templates(objects).items()
    ]
    code, said = kubectl(
        "create", "--dry-run=server", "--validate=strict", "-f", "-", objects=[*objects, *pods]
    )
    assert code == 0, said


def test_server_refuses_a_misspelt_field_and_a_pod_that_is_not_restricted():
    objects = build("overlays/cpu-smoke")
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x", "namespace": "training"}}
    spec = templates(objects)["head"]["spec"]
    del spec["securityContext"]["runAsNonRoot"]
    create = "create", "--dry-run=server", "--validate=strict", "-f", "-"
    code, said = kubectl(*create, objects=[pod | {"spec": spec}])
    assert code != 0 and 'violates PodSecurity "restricted:latest": runAsNonRoot' in said
    spec["terminationGracePeriod"] = 1
    code, said = kubectl(*create, objects=[pod | {"spec": spec}])
    assert code != 0 and 'unknown field "spec.terminationGracePeriod"' in said


@pytest.mark.parametrize(
    ("who", "allowed", "refused"),
    [
        (
            ["--as=one", "--as-group=ml-engineers"],
            ["create rayjobs", "get secrets/elastic-dp-auth", "create pods/portforward"],
            ["delete pods", "get secrets/other", "patch rayclusters", "create roles"],
        ),
        (
            ["--as=one", "--as-group=ml-platform"],
            ["patch rayclusters", "delete pods", "delete poddisruptionbudgets"],
            ["get secrets/other", "create roles", "create serviceaccounts"],
        ),
        (
            ["--as=system:serviceaccount:training:elastic-dp-worker"],
            [],
            ["list pods", "get secrets/elastic-dp-auth", "create rayjobs"],
        ),
    ],
    ids=["engineer", "operator", "worker"],
)
def test_each_role_may_do_what_it_needs_and_nothing_else(who, allowed, refused):
    for rights, answer in ((allowed, "yes"), (refused, "no")):
        for right in rights:
            verb, what = right.split()
            _, _, part = what.partition("pods/")
            words = [verb, "pods", f"--subresource={part}"] if part else [verb, what]
            _, said = kubectl("auth", "can-i", *words, "-n", "training", *who)
            assert answer in said.split(), (right, said)
