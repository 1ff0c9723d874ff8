"""What the clouds, KubeRay and Kubernetes ask of a manifest. Each test names the page or file that
says so; none was tried on a cluster."""

import json
import re

import pytest
import yaml

from tests.k8s.manifests import (
    K8S,
    ON_WHOLE_MACHINES,
    OVERLAYS,
    SHARED,
    build,
    cluster,
    environment,
    groups,
    of_kind,
    templates,
)

ON_GKE = [folder for folder in OVERLAYS if "/gke-" in folder]
ON_EKS = [folder for folder in OVERLAYS if "/eks-" in folder]


def workers(folder):
    return {name: group["template"]["spec"] for name, group in groups(build(folder)).items()}


def values():
    return yaml.safe_load((K8S / "admin/kuberay/values.yaml").read_text())


# ------------------------------------------------------------------------------------------------
# 15: GPUs, DNS, identity


@pytest.mark.parametrize("folder", ON_GKE)
def test_a_worker_on_gke_finds_the_mounted_driver(folder):
    """ "Run GPUs in GKE Standard node pools", about the CUDA libraries: the driver's are mounted at
    /usr/local/nvidia/lib64, and LD_LIBRARY_PATH must name that folder."""
    for pod in workers(folder).values():
        paths = environment(pod["containers"][0])["LD_LIBRARY_PATH"].split(":")
        assert "/usr/local/nvidia/lib64" in paths


@pytest.mark.parametrize("folder", OVERLAYS)
def test_names_resolve_whatever_answers_for_the_cluster(folder):
    """NodeLocal DNSCache listens at 169.254.20.10 in its node's own network (kubernetes/kubernetes,
    cluster/addons/dns/nodelocaldns/README.md), Cloud DNS for GKE at 169.254.169.254
    (tektoncd/operator#4000): no selector of pods matches either, and DNS is asked over TCP, too."""
    [policy] = of_kind(build(folder), "NetworkPolicy")
    allowed = {}
    for rule in policy["spec"]["egress"]:
        for port in rule.get("ports", []):
            if port["port"] == 53:
                allowed.setdefault(port["protocol"], []).extend(rule["to"])
    assert set(allowed) == {"UDP", "TCP"}
    for peers in allowed.values():
        addresses = {peer["ipBlock"]["cidr"] for peer in peers if "ipBlock" in peer}
        apps = {p["podSelector"]["matchLabels"]["k8s-app"] for p in peers if "podSelector" in p}
        assert {"169.254.20.10/32", "169.254.169.254/32"} <= addresses
        assert apps == {"kube-dns", "node-local-dns"}
        # LocalDNS of AKS: parts/linux/cloud-init/artifacts/localdns.sh in Azure/AgentBaker
        assert ("169.254.10.11/32" in addresses) == (folder == "overlays/aks-spot")


@pytest.mark.parametrize("folder", OVERLAYS)
def test_storage_is_reached_over_ipv6_and_the_machines_own_identity_over_neither(folder):
    """An ipBlock of IPv4 matches no address of IPv6. The metadata service of EC2 is 169.254.169.254
    and fd00:ec2::254."""
    [policy] = of_kind(build(folder), "NetworkPolicy")
    open_to = [
        peer["ipBlock"]
        for rule in policy["spec"]["egress"]
        if {"protocol": "TCP", "port": 443} in rule.get("ports", [])
        for peer in rule["to"]
    ]
    assert {block["cidr"] for block in open_to} == {"0.0.0.0/0", "::/0"}
    assert {hidden for block in open_to for hidden in block["except"]} >= {
        "169.254.0.0/16",
        "fd00:ec2::/32",
    }


@pytest.mark.parametrize("folder", ON_EKS)
def test_pods_on_eks_reach_the_agent_that_gives_them_their_role(folder):
    """ "EKS Pod Identity agent": it listens on port 80 of 169.254.170.23 and [fd00:ec2::23] of each
    node."""
    [policy] = of_kind(build(folder), "NetworkPolicy")
    [rule] = [
        r for r in policy["spec"]["egress"] if r.get("ports") == [{"protocol": "TCP", "port": 80}]
    ]
    agents = {peer["ipBlock"]["cidr"] for peer in rule["to"]}
    assert agents == {"169.254.170.23/32", "fd00:ec2::23/128"}


def test_pods_on_aks_get_their_identity():
    """ "Use Microsoft Entra Workload ID with AKS": the webhook looks at a label of the pod and an
    annotation of its account."""
    for template in templates(build("overlays/aks-spot")).values():
        assert template["metadata"]["labels"]["azure.workload.identity/use"] == "true"
    for account in of_kind(build("namespaces/aks"), "ServiceAccount"):
        assert account["metadata"]["annotations"]["azure.workload.identity/client-id"]


# ------------------------------------------------------------------------------------------------
# 16: times of a new node


def test_the_operator_waits_for_a_head_as_long_as_a_node_takes():
    """JobStatusCheckTimeoutExceeded is never retried (checkBackoffLimitAndUpdateStatusIfNeeded of
    ray-operator/controllers/ray/rayjob_controller.go); DEFAULT_RAYJOB_STATUS_CHECK_TIMEOUT_SECONDS
    is 300."""
    [variable] = [v for v in values()["env"] if v["name"] == "RAYJOB_STATUS_CHECK_TIMEOUT_SECONDS"]
    assert isinstance(variable["value"], str) and int(variable["value"]) == 1800


# ------------------------------------------------------------------------------------------------
# 17: kinds, gates, alerts

# helm-chart/kuberay-operator/values.yaml of KubeRay v1.7.0
GATES_OF_THE_CHART = {
    "RayClusterStatusConditions": True,
    "RayJobDeletionPolicy": True,
    "RayMultiHostIndexing": True,
    "RayServiceIncrementalUpgrade": True,
    "RayCronJob": False,
    "RayClusterMTLS": False,
    "RayClusterNetworkPolicy": False,
    "RayClusterHistoryServer": False,
}


def test_the_operators_values_have_the_gate_of_each_manifest_and_the_charts_own():
    """ValidateRayClusterSpec (ray-operator/controllers/ray/utils/validation.go) refuses backend
    rocksdb without its gate. Helm replaces lists, so the chart's own gates must be there again."""
    gates = {gate["name"]: gate["enabled"] for gate in values()["featureGates"]}
    needs = {
        "GCSFaultToleranceEmbeddedStorage"
        for folder in OVERLAYS
        if cluster(build(folder)).get("gcsFaultToleranceOptions", {}).get("backend") == "rocksdb"
    }
    assert needs == {"GCSFaultToleranceEmbeddedStorage"}
    assert gates == GATES_OF_THE_CHART | dict.fromkeys(needs, True)


def test_alerts_of_the_operators_metrics_are_said_to_need_its_monitor():
    """helm-chart/kuberay-operator/values.yaml: metrics.serviceMonitor.enabled is false; with
    honorLabels the label namespace is the RayJob's
    (ray-operator/controllers/ray/metrics/ray_job_metrics.go)."""
    monitored = yaml.safe_load((K8S / "admin/kuberay/monitored.yaml").read_text())["metrics"]
    assert monitored["enabled"] and monitored["serviceMonitor"]["enabled"]
    assert monitored["serviceMonitor"]["honorLabels"]
    [rules] = of_kind(build("monitoring"), "PrometheusRule")
    [monitor] = of_kind(build("monitoring"), "PodMonitor")
    assert monitored["serviceMonitor"]["additionalLabels"] == rules["metadata"]["labels"]
    assert rules["metadata"]["labels"] == monitor["metadata"]["labels"]
    of_operator = {
        group["name"]
        for group in rules["spec"]["groups"]
        for rule in group["rules"]
        if "kuberay_" in rule["expr"]
    }
    assert of_operator == {"elastic-dp-operator"}
    before = (K8S / "monitoring/rules.yaml").read_text().partition("- name: elastic-dp-operator")[0]
    assert "k8s/admin/kuberay/monitored.yaml" in before


def test_alerts_name_labels_that_their_metrics_have():
    [monitor] = of_kind(build("monitoring"), "PodMonitor")
    set_by_us = {
        label["targetLabel"]: label["sourceLabels"]
        for endpoint in monitor["spec"]["podMetricsEndpoints"]
        for label in endpoint["relabelings"]
    }
    # The label of the pods is the RayJob's name, and the cluster's where it stays: it is no run's
    # name then.
    assert set_by_us["ray_instance"] == ["__meta_kubernetes_pod_label_app_kubernetes_io_instance"]
    assert "run" not in set_by_us
    of_kuberay = {"name", "namespace", "uid", "deployment_status"}
    [rules] = of_kind(build("monitoring"), "PrometheusRule")
    for group in rules["spec"]["groups"]:
        of_groups = {
            "elastic-dp-operator": of_kuberay,
            "elastic-dp-runs": {"run", "namespace"},  # the controller says of which run
        }
        there = of_groups.get(group["name"], set(set_by_us))
        for rule in group["rules"]:
            text = yaml.safe_dump(rule)
            asked = set(re.findall(r"\$labels\.(\w+)", text)) | set(
                re.findall(r"by \((\w+)\)", text)
            )
            assert asked and asked <= there, rule["alert"]


@pytest.mark.parametrize("folder", ON_EKS)
def test_all_workers_on_eks_have_one_kind_of_gpu(folder):
    """karpenter.k8s.aws/instance-gpu-name is a label that Karpenter selects machines by
    ("Scheduling", well-known labels)."""
    kinds = {
        pod["nodeSelector"]["karpenter.k8s.aws/instance-gpu-name"]
        for pod in workers(folder).values()
    }
    assert len(kinds) == 1


@pytest.mark.parametrize("folder", ON_GKE)
def test_all_workers_on_gke_have_one_kind_of_gpu(folder):
    kinds = {
        pod["nodeSelector"]["cloud.google.com/gke-accelerator"] for pod in workers(folder).values()
    }
    assert len(kinds) == 1


def test_all_workers_on_aks_have_one_type_of_machine():
    kinds = {
        pod["nodeSelector"]["node.kubernetes.io/instance-type"]
        for pod in workers("overlays/aks-spot").values()
    }
    assert len(kinds) == 1
    taint = {"key": "sku", "operator": "Equal", "value": "gpu", "effect": "NoSchedule"}
    assert all(taint in pod["tolerations"] for pod in workers("overlays/aks-spot").values())


@pytest.mark.parametrize("folder", ["overlays/eks-spot", "overlays/eks-shared"])
def test_zones_are_spread_over_by_pods_of_one_cluster(folder):
    """KubeRay sets ray.io/group and ray.io/cluster on each pod (labelPod in
    ray-operator/controllers/ray/common/pod.go), and the group's name is the same in every run;
    matchLabelKeys adds the pod's own value to the selector ("Pod Topology Spread Constraints")."""
    [spread] = workers(folder)["spot"]["topologySpreadConstraints"]
    assert spread == {
        "maxSkew": 1,
        "topologyKey": "topology.kubernetes.io/zone",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": {"ray.io/group": "spot"}},
        "matchLabelKeys": ["ray.io/cluster"],
    }


PREPULLS = [folder for folder in SHARED if folder.startswith("prepull/")]


@pytest.mark.parametrize("folder", PREPULLS)
def test_the_image_is_pulled_on_nodes_with_a_gpu_alone(folder):
    [daemon] = of_kind(build(folder), "DaemonSet")
    pod = daemon["spec"]["template"]["spec"]
    required = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    asked = {e["key"] for t in required["nodeSelectorTerms"] for e in t["matchExpressions"]}
    assert asked == {
        "cloud.google.com/gke-accelerator",
        "karpenter.k8s.aws/instance-gpu-name",
        "kubernetes.azure.com/accelerator",
        "nvidia.com/gpu.present",
    }
    # Whatever keeps other pods off the nodes of workers does not keep this one off.
    tolerated = {toleration["key"] for toleration in pod["tolerations"]}
    for overlay in OVERLAYS:
        for worker in workers(overlay).values():
            assert {t["key"] for t in worker.get("tolerations", [])} <= tolerated


@pytest.mark.parametrize(
    ("folder", "form"),
    [
        (
            "namespaces/gke",
            r"[\w.-]+@[\w.-]+",
        ),  # "Configure Google Groups for RBAC": an e-mail address
        (
            "namespaces/aks",
            r"[0-9a-f-]{36}",
        ),  # "Use Kubernetes RBAC with Entra integration": an object ID
    ],
)
def test_groups_are_named_as_the_cloud_names_them(folder, form):
    bindings = of_kind(build(folder), "RoleBinding")
    names = {subject["name"] for binding in bindings for subject in binding["subjects"]}
    assert len(names) == len(bindings) == 2
    assert all(re.fullmatch(form, name) for name in names)


def test_an_image_is_named_in_no_second_place():
    """`images:` matches the name that an image has by then: one that base had renamed was changed
    by an overlay's block only under its new name, and silently not at all under the old one."""
    for path in [*K8S.glob("base/*.yaml"), *K8S.glob("components/*/*.yaml")]:
        assert not re.search(r"^images:", path.read_text(), re.M), path
    base = yaml.safe_load((K8S / "base/rayjob.yaml").read_text())["spec"]["rayClusterSpec"]
    groups_of_it = [base["headGroupSpec"], *base["workerGroupSpecs"]]
    images = {g["template"]["spec"]["containers"][0]["image"] for g in groups_of_it}
    assert images == {"elastic-dp"}


# ------------------------------------------------------------------------------------------------
# 19: components


@pytest.mark.parametrize("folder", ON_WHOLE_MACHINES)
def test_all_gpus_that_nvlink_joins_are_in_one_pod(folder):
    """NCCL reaches only GPUs of its own container by NVLink (NVIDIA/nccl#324, #945). Its shared
    memory grows with them."""
    for pod in workers(folder).values():
        assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "8"
        [shm] = [volume for volume in pod["volumes"] if volume["name"] == "shm"]
        assert shm["emptyDir"]["sizeLimit"] == "64Gi"


def test_workers_get_efa():
    """ "Run machine learning training on Amazon EKS with Elastic Fabric Adapter": a p5.48xlarge has
    32, with 5120Mi of pages of 2 MiB. Extended resources and huge pages are asked for as limits
    that equal the requests (Kubernetes, "Manage HugePages"). EFA's traffic stays in its subnet,
    which is in one zone."""
    zones = set()
    for pod in workers("overlays/eks-efa").values():
        resources = pod["containers"][0]["resources"]
        for kind in ("requests", "limits"):
            assert resources[kind]["vpc.amazonaws.com/efa"] == "32"
            assert resources[kind]["hugepages-2Mi"] == "5120Mi"
        assert environment(pod["containers"][0])["FI_PROVIDER"] == "efa"
        assert pod["nodeSelector"]["karpenter.k8s.aws/instance-gpu-name"] == "h100"
        assert "topologySpreadConstraints" not in pod
        zones.add(pod["nodeSelector"]["topology.kubernetes.io/zone"])
    assert zones == {"us-east-1a"}  # overlays/eks-efa/run


def test_workers_get_gpudirect_rdma():
    """ "Create a custom AI-optimized GKE cluster": annotations for eight networks, the plugin from
    its node, its folder before the driver's, and its script before the workload. KubeRay joins
    command and `ray start` with && (BuildPod in ray-operator/controllers/ray/common/pod.go)."""
    for group in groups(build("overlays/gke-gpudirect")).values():
        annotations = group["template"]["metadata"]["annotations"]
        networks = json.loads(annotations["networking.gke.io/interfaces"])
        assert annotations["networking.gke.io/default-interface"] == "eth0"
        assert [n["network"] for n in networks] == [
            *("default", "gvnic-1"),
            *(f"rdma-{number}" for number in range(8)),
        ]
        assert [n["interfaceName"] for n in networks] == [f"eth{i}" for i in range(10)]
        pod = group["template"]["spec"]
        [container] = pod["containers"]
        assert container["command"] == ["source /usr/local/gib/scripts/set_nccl_env.sh"]
        paths = environment(container)["LD_LIBRARY_PATH"]
        assert paths == "/usr/local/gib/lib64:/usr/local/nvidia/lib64"
        mounts = {m["name"]: m["mountPath"] for m in container["volumeMounts"] if m.get("readOnly")}
        assert mounts == {"driver": "/usr/local/nvidia", "gib": "/usr/local/gib"}
        host = {v["name"]: v["hostPath"]["path"] for v in pod["volumes"] if "hostPath" in v}
        assert host == {
            "driver": "/home/kubernetes/bin/nvidia",
            "gib": "/home/kubernetes/bin/gib",
        }
        assert pod["nodeSelector"]["cloud.google.com/gke-accelerator"] == "nvidia-h200-141gb"


@pytest.mark.parametrize("folder", OVERLAYS)
def test_pods_are_let_into_their_namespace(folder):
    """ "Pod Security Standards": restricted and baseline forbid hostPath. One namespace is made for
    who needs it."""
    mounts_a_host = any(
        "hostPath" in v for p in templates(build(folder)).values() for v in p["spec"]["volumes"]
    )
    assert mounts_a_host == (folder == "overlays/gke-gpudirect")
    for name in ("base", "eks", "gke", "aks", "gke-gpudirect"):
        [space] = of_kind(build(f"namespaces/{name}"), "Namespace")
        level = space["metadata"]["labels"]["pod-security.kubernetes.io/enforce"]
        assert level == ("privileged" if name == "gke-gpudirect" else "restricted")


def test_minio_overlay_takes_keys_from_a_secret_and_lets_its_address_out():
    objects = build("overlays/minio")
    for template in templates(objects).values():
        [container] = template["spec"]["containers"]
        given = environment(container)
        assert given["AWS_ENDPOINT_URL"] == "http://minio.minio.svc:9000"
        assert given["AWS_REGION"] == "us-east-1"  # MinIO's own, unless it is given another
        keys = {v["name"]: v["valueFrom"] for v in container["env"] if "valueFrom" in v}
        assert keys == {
            "AWS_ACCESS_KEY_ID": {"secretKeyRef": {"name": "minio", "key": "access-key"}},
            "AWS_SECRET_ACCESS_KEY": {"secretKeyRef": {"name": "minio", "key": "secret-key"}},
        }


def test_nfs_overlay_mounts_the_runs_and_goes_out_by_the_proxy():
    """gRPC takes a proxy from https_proxy, in small letters, alone (doc/environment_variables.md of
    grpc/grpc)."""
    for template in templates(build("overlays/nfs")).values():
        [container] = template["spec"]["containers"]
        assert {"name": "runs", "mountPath": "/runs"} in container["volumeMounts"]
        given = environment(container)
        assert given["HTTPS_PROXY"] == "http://proxy.example.com:3128"
        assert {"localhost", ".svc", "10.0.0.0/8"} <= set(given["NO_PROXY"].split(","))
        assert not {"https_proxy", "http_proxy", "grpc_proxy"} & set(given)


@pytest.mark.parametrize("folder", ["overlays/minio", "overlays/nfs"])
def test_priorities_are_classes_that_there_are_and_spot_yields_to_all(folder):
    """A pod without a class has 0. cluster-autoscaler adds no node for pods below -10 (its flag
    expendable-pods-priority-cutoff)."""
    classes = {c["metadata"]["name"]: c for c in of_kind(build("admin/priority"), "PriorityClass")}
    pods = {name: template["spec"] for name, template in templates(build(folder)).items()}
    named = {name: pod["priorityClassName"] for name, pod in pods.items()}
    assert set(named.values()) == set(classes)
    head, regular, spot = (classes[named[name]] for name in ("head", "on-demand", "spot"))
    assert head["value"] > regular["value"] > 0 > spot["value"] >= -10
    assert spot["preemptionPolicy"] == "Never"


def test_cloud_overlays_name_no_priority_class():
    """A class that is not there keeps a pod from being made at all."""
    for folder in set(OVERLAYS) - {"overlays/minio", "overlays/nfs"}:
        assert not any("priorityClassName" in t["spec"] for t in templates(build(folder)).values())
