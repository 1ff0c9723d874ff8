"""Who may talk to whom, who may be evicted, and where pods may run: written out, since nothing else would miss a line."""

import pytest

from tests.k8s.manifests import OVERLAYS, build, groups, of_kind, ray_object, templates

INSTANCE = "app.kubernetes.io/instance"
GPU = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
ON_GPUS = [folder for folder in OVERLAYS if folder != "overlays/cpu-smoke"]
EKS, GKE = "karpenter.sh/capacity-type", "cloud.google.com/gke-spot"


def own(name):
    return {"podSelector": {"matchLabels": {INSTANCE: name}}}


def namespace(name):
    return {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}}}


def tcp(*ports):
    return [{"protocol": "TCP", "port": port} for port in ports]


@pytest.mark.parametrize("folder", OVERLAYS)
def test_the_network_policy_is_this(folder):
    objects = build(folder)
    [policy] = of_kind(objects, "NetworkPolicy")
    name = ray_object(objects)["metadata"]["name"]
    dns = namespace("kube-system") | {"podSelector": {"matchLabels": {"k8s-app": "kube-dns"}}}
    anywhere = {"ipBlock": {"cidr": "0.0.0.0/0", "except": ["169.254.0.0/16"]}}
    assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
    assert policy["spec"]["ingress"] == [
        {"from": [own(name)]},
        {"from": [namespace("kuberay-operator")], "ports": tcp(8265, 52365)},
        {"from": [namespace("monitoring")], "ports": tcp(8080, 44217, 44227)},
    ]
    among, names, out, *more = policy["spec"]["egress"]
    assert among == {"to": [own(name)]}
    assert names == {"to": [dns], "ports": [{"protocol": "UDP", "port": 53}, *tcp(53)]}
    assert out == {"to": [anywhere], "ports": tcp(443, 6443)}
    identity = [f"169.254.169.{last}/32" for last in (252, 254)]
    redis = {"podSelector": {"matchLabels": {"app.kubernetes.io/name": "redis"}}}
    assert more == {
        "overlays/gke-spot": [_to(identity)],
        "overlays/gke-shared": [_to(identity)],
        "overlays/eks-shared": [{"to": [redis], "ports": tcp(6379)}],
    }.get(folder, [])


def _to(addresses):
    return {"to": [{"ipBlock": {"cidr": cidr}} for cidr in addresses], "ports": tcp(80, 988)}


@pytest.mark.parametrize("folder", OVERLAYS)
def test_budgets_are_the_heads_and_the_workers(folder):
    objects = build(folder)
    name = ray_object(objects)["metadata"]["name"]
    kinds = {
        budget["metadata"]["name"]: budget["spec"]["selector"]["matchLabels"]["ray.io/node-type"]
        for budget in of_kind(objects, "PodDisruptionBudget")
    }
    assert kinds == {f"{name}-head": "head", f"{name}-workers": "worker"}


@pytest.mark.parametrize("folder", OVERLAYS)
def test_all_is_in_one_namespace(folder):
    assert {thing["metadata"]["namespace"] for thing in build(folder)} == {"training"}


@pytest.mark.parametrize("folder", ON_GPUS)
def test_workers_get_gpus(folder):
    for group in groups(build(folder)).values():
        pod = group["template"]["spec"]
        assert GPU in pod["tolerations"]  # GPU nodes turn others away
        asked = pod["containers"][0]["resources"]
        assert asked["requests"]["nvidia.com/gpu"] == asked["limits"]["nvidia.com/gpu"] == "1"


@pytest.mark.parametrize("folder", ON_GPUS)
def test_only_spot_workers_are_on_spot_machines(folder):
    pods = {name: template["spec"] for name, template in templates(build(folder)).items()}
    if "eks" in folder:
        wanted = {"head": "on-demand", "spot": "spot", "on-demand": "on-demand"}
        assert {name: pod["nodeSelector"][EKS] for name, pod in pods.items()} == wanted
        [spread] = pods["spot"]["topologySpreadConstraints"]
        assert spread["topologyKey"] == "topology.kubernetes.io/zone"
        assert spread["labelSelector"] == {"matchLabels": {"ray.io/group": "spot"}}
        return
    expression = {"key": GKE, "operator": "DoesNotExist"}
    for name in ("head", "on-demand"):
        required = pods[name]["affinity"]["nodeAffinity"]
        [term] = required["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
        assert term == {"matchExpressions": [expression]}
    assert pods["spot"]["nodeSelector"][GKE] == "true"
    taint = {"key": GKE, "operator": "Equal", "value": "true", "effect": "NoSchedule"}
    assert taint in pods["spot"]["tolerations"]
    for name in ("spot", "on-demand"):
        assert pods[name]["nodeSelector"]["cloud.google.com/gke-accelerator"]
