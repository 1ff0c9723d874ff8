"""What must fit together across fields and files: names, times, users, volumes, the image, the
job's own command; and what Ray's autoscaler makes of the cluster, asked of Ray's own code.
"""

import importlib
import itertools
import re
import shlex

import pytest
import yaml
from ray.autoscaler._private.kuberay.autoscaling_config import (
    _derive_autoscaling_config_from_ray_cr,
)

from elastic_dp.cluster import overrides
from elastic_dp.config import JobSpec
from tests.k8s.fields import is_field
from tests.k8s.manifests import (
    ON_WHOLE_MACHINES,
    OVERLAYS,
    ROOT,
    RUNS,
    build,
    cluster,
    environment,
    groups,
    of_kind,
    ray_object,
    templates,
)

SETTLE_S = 5  # between the end of Ray's drain and the end of its processes
NOTICE_S = {
    "eks-spot": 120,
    "eks-shared": 120,
    "gke-spot": 15,
    "gke-shared": 15,
    "gke-gpudirect": 15,
    "eks-efa": 120,
    "aks-spot": 30,
}  # of a spot reclaim
INSTANCE = "app.kubernetes.io/instance"


@pytest.mark.parametrize("folder", [f"overlays/{name}" for name in NOTICE_S])
def test_a_spot_worker_is_done_before_its_machine_goes(folder):
    pod = groups(build(folder))["spot"]["template"]["spec"]
    drain = float(environment(pod["containers"][0])["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"])
    assert drain + SETTLE_S <= pod["terminationGracePeriodSeconds"] <= NOTICE_S[folder[9:]]


@pytest.mark.parametrize("folder", OVERLAYS)
def test_pods_of_a_run_are_selected_by_its_name(folder):
    objects = build(folder)
    name = ray_object(objects)["metadata"]["name"]
    for template in templates(objects).values():
        assert template["metadata"]["labels"][INSTANCE] == name
    [policy] = of_kind(objects, "NetworkPolicy")
    own = {"podSelector": {"matchLabels": {INSTANCE: name}}}
    assert policy["spec"]["podSelector"] == own["podSelector"]
    # Among themselves on every port: NCCL's and Gloo's are known only when they listen.
    assert {"from": [own]} in policy["spec"]["ingress"] and {"to": [own]} in policy["spec"][
        "egress"
    ]
    budgets = of_kind(objects, "PodDisruptionBudget")
    assert {b["metadata"]["name"] for b in budgets} == {f"{name}-workers"}
    assert {b["spec"]["selector"]["matchLabels"][INSTANCE] for b in budgets} == {name}
    # Not a percentage and not maxUnavailable: those need a scale subresource, which a RayCluster
    # has not.
    assert {b["spec"]["minAvailable"] for b in budgets} == {1}
    assert "NAME" not in yaml.safe_dump(objects)


@pytest.mark.parametrize("folder", RUNS)
def test_a_retry_is_the_same_run(folder):
    """name= and storage_path= are in the command, so that a new RayCluster goes on where the lost
    one was."""
    objects = build(folder)
    job = ray_object(objects)
    given = _sets(job["spec"]["entrypoint"])
    assert given["name"] == job["metadata"]["name"]
    _outlives_pods(objects, given["storage_path"])


@pytest.mark.parametrize("folder", RUNS)
def test_the_entrypoint_sets_fields_that_a_job_has(folder):
    objects = build(folder)
    words = shlex.split(ray_object(objects)["spec"]["entrypoint"])
    assert words[:2] == ["elastic-dp", "run"] and (ROOT / words[2]).is_file()
    given = _sets(" ".join(words))
    for name in set(given) - {"storage_path"}:
        assert is_field(JobSpec, name.split(".")), name
    gpus = int(given.get("scaling.resources_per_worker.GPU", "0"))
    cpus = int(given.get("scaling.resources_per_worker.CPU", "1"))
    most = 0
    for group in groups(objects).values():
        resources = group["template"]["spec"]["containers"][0]["resources"]
        there = int(resources["limits"].get("nvidia.com/gpu", "0"))
        assert bool(there) == bool(gpus)
        a_pod = there // gpus if gpus else 1
        assert a_pod * gpus == there and a_pod * cpus <= int(resources["requests"]["cpu"])
        most += group["maxReplicas"] * a_pod
        spare = (group["maxReplicas"] - 1) * a_pod
        assert int(given["scaling.max_workers"]) <= spare, "one pod more, for a replacement"
    assert int(given["scaling.max_workers"]) <= most


@pytest.mark.parametrize("folder", RUNS)
def test_the_entrypoint_makes_that_run(folder, monkeypatch):
    """The job's own script under the manifest's --set, up to where it would start."""
    words = shlex.split(ray_object(build(folder))["spec"]["entrypoint"])
    given = _sets(" ".join(words))
    job = importlib.import_module(words[2].removesuffix(".py").replace("/", "."))
    monkeypatch.setattr(job, "write_shards", lambda *_: None)
    changes = overrides.Overrides([f"{name}={value}" for name, value in given.items()])
    with overrides.overriding(changes):
        trainer = job.make_trainer(data="/unread")
    assert trainer.url == f"{given['storage_path']}/{given['name']}"
    assert trainer.spec.scaling.max_workers == int(given["scaling.max_workers"])
    assert trainer.spec.scaling.virtual_workers == int(given["scaling.virtual_workers"])
    gpus = trainer.spec.scaling.resources_per_worker.get("GPU", 0)
    assert gpus == float(given.get("scaling.resources_per_worker.GPU", 0))
    assert trainer.spec.checkpoint.enabled


@pytest.mark.parametrize(
    ("role", "folder"),
    [("engineer", folder) for folder in RUNS] + [("operator", folder) for folder in OVERLAYS],
)
def test_roles_allow_applying_their_overlay(role, folder):
    """`kubectl apply` looks, creates what is not there and patches what is."""
    roles = of_kind(build("namespaces/base"), "Role")
    (rules,) = (r["rules"] for r in roles if r["metadata"]["name"] == f"elastic-dp-{role}")
    for made in build(folder):
        group, _, _ = made["apiVersion"].rpartition("/")
        plural = re.sub("y$", "ie", made["kind"].lower()) + "s"
        allowed = {
            verb
            for rule in rules
            if group in rule["apiGroups"] and plural in rule["resources"]
            for verb in rule["verbs"]
        }
        assert {"get", "create", "patch"} <= allowed, plural


@pytest.mark.parametrize("folder", OVERLAYS)
def test_rays_autoscaler_reads_the_groups_as_meant(folder):
    objects = build(folder)
    resource = {"metadata": {"name": "c", "namespace": "n"}, "spec": cluster(objects)}
    config = _derive_autoscaling_config_from_ray_cr(resource)
    types = config["available_node_types"]
    assert types["headgroup"]["resources"]["CPU"] == 0
    gpu = {"GPU": 8 if folder in ON_WHOLE_MACHINES else 1}
    if folder == "overlays/cpu-smoke":
        gpu = {}
    for name in ("spot", "on-demand"):
        assert types[name]["labels"] == {"ray.io/market-type": name}
        assert {k: v for k, v in types[name]["resources"].items() if k == "GPU"} == gpu
        assert types[name]["resources"]["CPU"] >= 1 and types[name]["resources"]["memory"] > 2**31
        assert types[name]["min_workers"] == 0
    assert types["spot"]["priority"] > types["on-demand"]["priority"]
    assert config["idle_timeout_minutes"] == 1


def test_kueue_covers_what_a_run_asks_for():
    job = ray_object(build("overlays/eks-spot"))
    objects = build("admin/kueue")
    queues = {queue["metadata"]["name"]: queue for queue in of_kind(objects, "LocalQueue")}
    local = queues[job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"]]
    assert local["metadata"]["namespace"] == job["metadata"]["namespace"]
    [priority] = of_kind(objects, "WorkloadPriorityClass")
    assert (
        job["metadata"]["labels"]["kueue.x-k8s.io/priority-class"] == priority["metadata"]["name"]
    )
    assert job["metadata"]["annotations"] == {"kueue.x-k8s.io/elastic-job": "true"}  # it scales
    [queue] = of_kind(objects, "ClusterQueue")
    assert local["spec"]["clusterQueue"] == queue["metadata"]["name"]
    [group] = queue["spec"]["resourceGroups"]
    flavors = {flavor["metadata"]["name"]: flavor for flavor in of_kind(objects, "ResourceFlavor")}
    assert {flavor["name"] for flavor in group["flavors"]} == set(flavors)
    for name, worker in groups(build("overlays/eks-spot")).items():
        pod = worker["template"]["spec"]
        # The flavour is the head's, too: it must not name a GPU.
        assert flavors[name]["spec"]["nodeLabels"].items() <= pod["nodeSelector"].items()
        asked = set(pod["containers"][0]["resources"]["requests"]) - {"ephemeral-storage"}
        assert asked <= set(group["coveredResources"])


def _sets(command: str) -> dict[str, str]:
    words = shlex.split(command)
    pairs = [after for word, after in itertools.pairwise(words) if word == "--set"]
    return dict(pair.split("=", 1) for pair in pairs)


def _outlives_pods(objects: list, path: str) -> None:
    if "://" in path:
        return
    for template in templates(objects).values():
        mounts = {
            m["mountPath"]: m["name"] for m in template["spec"]["containers"][0]["volumeMounts"]
        }
        volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
        assert "persistentVolumeClaim" in volumes[mounts[path]]
