"""Who may talk to whom, who may be evicted, and where pods may run: written out, since nothing else
would miss a line."""

import pytest

from tests.k8s.manifests import (
    ON_WHOLE_MACHINES,
    OVERLAYS,
    build,
    groups,
    of_kind,
    ray_object,
    templates,
)

INSTANCE = "app.kubernetes.io/instance"
GPU = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
ON_GPUS = [folder for folder in OVERLAYS if folder != "overlays/cpu-smoke"]
EKS, GKE = "karpenter.sh/capacity-type", "cloud.google.com/gke-spot"
AKS = "kubernetes.azure.com/scalesetpriority"


def own(name):
    return {"podSelector": {"matchLabels": {INSTANCE: name}}}


def namespace(name):
    return {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}}}


def tcp(*ports):
    return [{"protocol": "TCP", "port": port} for port in ports]


def blocks(*cidrs):
    return [{"ipBlock": {"cidr": cidr}} for cidr in cidrs]


DNS = [{"protocol": "UDP", "port": 53}, *tcp(53)]


@pytest.mark.parametrize("folder", OVERLAYS)
def test_the_network_policy_is_this(folder):
    objects = build(folder)
    [policy] = of_kind(objects, "NetworkPolicy")
    name = ray_object(objects)["metadata"]["name"]
    dns = [
        namespace("kube-system") | {"podSelector": {"matchLabels": {"k8s-app": app}}}
        for app in ("kube-dns", "node-local-dns")
    ] + blocks("169.254.20.10/32", "169.254.169.254/32")
    anywhere = [
        {"ipBlock": {"cidr": "0.0.0.0/0", "except": ["169.254.0.0/16"]}},
        {"ipBlock": {"cidr": "::/0", "except": ["fe80::/10", "fd00:ec2::/32"]}},
    ]
    assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
    assert policy["spec"]["ingress"] == [
        {"from": [own(name)]},
        {"from": [namespace("kuberay-operator")], "ports": tcp(8265, 52365)},
        {"from": [namespace("monitoring")], "ports": tcp(8080, 44217, 44227)},
    ]
    among, names, out, *more = policy["spec"]["egress"]
    assert among == {"to": [own(name)]}
    assert names == {"to": dns, "ports": DNS}
    assert out == {"to": anywhere, "ports": tcp(443, 6443)}
    redis = {"podSelector": {"matchLabels": {"app.kubernetes.io/name": "redis"}}}
    google = {"to": blocks("169.254.169.252/32", "169.254.169.254/32"), "ports": tcp(80, 988)}
    amazon = {"to": blocks("169.254.170.23/32", "fd00:ec2::23/128"), "ports": tcp(80)}
    azure = {"to": blocks("169.254.10.10/32", "169.254.10.11/32"), "ports": DNS}
    assert more == {
        "overlays/gke-spot": [google],
        "overlays/gke-shared": [google],
        "overlays/gke-gpudirect": [google],
        "overlays/eks-spot": [amazon],
        "overlays/eks-efa": [amazon],
        "overlays/eks-shared": [amazon, {"to": [redis], "ports": tcp(6379)}],
        "overlays/aks-spot": [azure],
        "overlays/minio": [{"to": [namespace("minio")], "ports": tcp(9000)}],
        "overlays/nfs": [{"to": blocks("10.0.0.0/8"), "ports": tcp(3128)}],
    }.get(folder, [])


@pytest.mark.parametrize("folder", OVERLAYS)
def test_budget_is_that_of_workers_since_an_evicted_head_loses_no_step(folder):
    objects = build(folder)
    name = ray_object(objects)["metadata"]["name"]
    kinds = {
        budget["metadata"]["name"]: budget["spec"]["selector"]["matchLabels"]["ray.io/node-type"]
        for budget in of_kind(objects, "PodDisruptionBudget")
    }
    assert kinds == {f"{name}-workers": "worker"}


@pytest.mark.parametrize("folder", OVERLAYS)
def test_all_is_in_one_namespace(folder):
    assert {thing["metadata"]["namespace"] for thing in build(folder)} == {"training"}


@pytest.mark.parametrize("folder", ON_GPUS)
def test_workers_get_gpus(folder):
    for group in groups(build(folder)).values():
        pod = group["template"]["spec"]
        assert GPU in pod["tolerations"]  # GPU nodes turn others away
        asked = pod["containers"][0]["resources"]
        gpus = {asked[kind]["nvidia.com/gpu"] for kind in ("requests", "limits")}
        assert gpus == {"8" if folder in ON_WHOLE_MACHINES else "1"}


@pytest.mark.parametrize("folder", [folder for folder in OVERLAYS if "/eks-" in folder])
def test_only_spot_workers_are_on_spot_machines_of_eks(folder):
    pods = {name: template["spec"] for name, template in templates(build(folder)).items()}
    wanted = {"head": "on-demand", "spot": "spot", "on-demand": "on-demand"}
    assert {name: pod["nodeSelector"][EKS] for name, pod in pods.items()} == wanted


@pytest.mark.parametrize("folder", [folder for folder in OVERLAYS if "/gke-" in folder])
def test_only_spot_workers_are_on_spot_machines_of_gke(folder):
    pods = {name: template["spec"] for name, template in templates(build(folder)).items()}
    for name in ("head", "on-demand"):
        assert _required(pods[name]) == {"key": GKE, "operator": "DoesNotExist"}
    assert pods["spot"]["nodeSelector"][GKE] == "true"
    taint = {"key": GKE, "operator": "Equal", "value": "true", "effect": "NoSchedule"}
    assert taint in pods["spot"]["tolerations"]


def test_only_spot_workers_are_on_spot_machines_of_aks():
    """Label and taint as Microsoft's "Add an Azure Spot node pool to an AKS cluster" has them."""
    pods = {
        name: template["spec"] for name, template in templates(build("overlays/aks-spot")).items()
    }
    for name in ("head", "on-demand"):
        assert _required(pods[name]) == {"key": AKS, "operator": "NotIn", "values": ["spot"]}
    assert pods["spot"]["nodeSelector"][AKS] == "spot"
    taint = {"key": AKS, "operator": "Equal", "value": "spot", "effect": "NoSchedule"}
    assert taint in pods["spot"]["tolerations"] and taint not in pods["on-demand"]["tolerations"]


def _required(pod):
    required = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    [term] = required["nodeSelectorTerms"]
    [expression] = term["matchExpressions"]
    return expression
