"""The fields of the manifests that something breaks without, each with what.

`place` is where in the built objects: "job" (the RayJob's spec), "cluster" (what becomes the
RayCluster's), "head" and "worker" (a pod template with its group). `holds` gets the field's value
and the whole group or spec.
"""

import dataclasses
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tests.k8s.manifests import cluster, environment, ray_object

SETTLE_S = 5  # between the end of Ray's drain and the end of its processes


@dataclass(frozen=True)
class Field:
    place: str
    path: str
    why: str
    holds: Callable[[Any, dict[str, Any]], bool] = lambda value, group: bool(value)

    def __str__(self) -> str:
        return f"{self.place}.{self.path}"


def is_(wanted: Any) -> Callable[[Any, Any], bool]:
    return lambda value, group: value == wanted


def least(number: float) -> Callable[[Any, Any], bool]:
    return lambda value, group: float(value) >= number


def has(**wanted: Any) -> Callable[[Any, Any], bool]:
    return lambda value, group: all(value.get(key) == want for key, want in wanted.items())


def outlives_the_drain(grace: Any, group: dict[str, Any]) -> bool:
    container = group["template"]["spec"]["containers"][0]
    drain = float(environment(container)["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"])
    return drain + SETTLE_S <= grace


def shell_free(command: Any, job: Any) -> bool:
    return command.startswith("elastic-dp run jobs/") and not set("&;|`$\n") & set(command)


def is_limited(volume: Any, group: Any) -> bool:
    return bool(volume["emptyDir"]["sizeLimit"])


CONTAINER = "template.spec.containers.0."
POD = "template.spec."
SAFE = has(
    allowPrivilegeEscalation=False, readOnlyRootFilesystem=True, capabilities={"drop": ["ALL"]}
)
ONE_USER = has(
    runAsNonRoot=True,
    runAsUser=1000,
    runAsGroup=1000,
    fsGroup=1000,
    seccompProfile={"type": "RuntimeDefault"},
)

JOB = [
    Field("job", "entrypoint", "what runs, in the foreground: its end is the run's", shell_free),
    Field("job", "backoffLimit", "without it a lost cluster is the end of the RayJob", least(1)),
    Field("job", "submissionMode", "no submitter pod to lose", is_("HTTPMode")),
    Field("job", "activeDeadlineSeconds", "a run that hangs does not hold GPUs for ever", least(1)),
    Field("job", "shutdownAfterJobFinishes", "GPUs go when the run ends; Kueue needs it"),
    Field("job", "ttlSecondsAfterFinished", "time to read logs, and no longer", least(60)),
]
CLUSTER = [
    Field("cluster", "rayVersion", "token, priorities and HTTP probes depend on it"),
    Field("cluster", "enableInTreeAutoscaling", "a pending worker is what adds a node"),
    Field("cluster", "authOptions.mode", "left out is off", is_("token")),
    Field("cluster", "authOptions.secretName", "one token for all retries and clusters"),
    Field("cluster", "autoscalerOptions.version", "priorities and idle times need v2", is_("v2")),
    Field("cluster", "autoscalerOptions.idleTimeoutSeconds", "what is given back goes", least(1)),
    Field("cluster", "autoscalerOptions.imagePullPolicy", "as Ray's", is_("IfNotPresent")),
    Field("cluster", "autoscalerOptions.resources.requests.cpu", "it is not starved by the head"),
    Field("cluster", "autoscalerOptions.resources.requests.memory", "it is not evicted first"),
    Field("cluster", "autoscalerOptions.resources.limits.memory", "restricted by a quota, too"),
    Field("cluster", "autoscalerOptions.securityContext", "it is a container like others", SAFE),
    Field(
        "cluster",
        "autoscalerOptions.args",
        "KubeRay starts an autoscaler that ended no second time",
        lambda value, _: "while" in value[0] and "$KUBERAY_GEN_AUTOSCALER_START_CMD" in value[0],
    ),
    Field(
        "cluster",
        "autoscalerOptions.command",
        "a shell, for the loop",
        is_(["/bin/bash", "-c", "--"]),
    ),
    Field(
        "cluster", "autoscalerOptions.volumeMounts./tmp", "its root is read-only", has(name="tmp")
    ),
    Field("cluster", "autoscalerOptions.volumeMounts./home/ray", "its home, too", has(name="home")),
    Field(
        "cluster", "autoscalerOptions.env.AUTOSCALER_UPDATE_INTERVAL_S", "5 s otherwise", least(1)
    ),
    Field(
        "cluster",
        "autoscalerOptions.env.RAY_AUTOSCALER_RECONCILE_ALLOCATE_STATUS_TIMEOUT_S",
        # A pod that is not ready by then is deleted: a GPU node boots, loads its driver and pulls
        # the image in up to 15 minutes (kuberay#4226). Ray's own default, 3600, is the most that
        # makes sense.
        "spot that does not come is waited for an hour otherwise",
        lambda value, _: 900 <= float(value) < 3600,
    ),
    Field(
        "cluster",
        "autoscalerOptions.env.RAY_AUTOSCALER_AVAILABILITY_RECOVERY_S",
        "when spot is tried again",
        least(60),
    ),
]
NODE = [
    Field("", "rayStartParams.object-store-memory", "30 % of memory otherwise", least(75e6)),
    Field("", "labels.ray.io/market-type", "by it a job asks for spot or on-demand"),
    Field(
        "", "template.metadata.labels.app.kubernetes.io/instance", "policy and budgets select by it"
    ),
    Field(
        "",
        "template.metadata.annotations.sidecar.istio.io/inject",
        "no proxy between GPUs",
        is_("false"),
    ),
    Field("", POD + "serviceAccountName", "who may use object storage"),
    Field(
        "",
        POD + "terminationGracePeriodSeconds",
        "SIGKILL comes after the drain",
        outlives_the_drain,
    ),
    Field("", POD + "securityContext", "not root, and one user for all volumes", ONE_USER),
    Field("", CONTAINER + "image", "the job's code and its packages"),
    Field(
        "", CONTAINER + "imagePullPolicy", "a pulled image is not pulled again", is_("IfNotPresent")
    ),
    Field("", CONTAINER + "workingDir", "the entrypoint names jobs/ from there", is_("/app")),
    Field("", CONTAINER + "securityContext", "the strictest Pod Security Standard", SAFE),
    Field("", CONTAINER + "resources.requests.cpu", "Ray's CPUs where there is no limit"),
    Field(
        "",
        CONTAINER + "resources.requests.memory",
        "where it fits",
        lambda v, g: v == g["template"]["spec"]["containers"][0]["resources"]["limits"]["memory"],
    ),
    Field("", CONTAINER + "resources.requests.ephemeral-storage", "logs and spilled objects"),
    Field(
        "", CONTAINER + "resources.limits.memory", "Ray's memory; a leak ends one pod, not a node"
    ),
    Field("", CONTAINER + "ports.metrics", "Prometheus finds it by this name", is_(8080)),
    Field(
        "",
        CONTAINER + "env.RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S",
        "30 s otherwise, as the default grace",
        least(1),
    ),
    Field("", CONTAINER + "env.RAY_USAGE_STATS_ENABLED", "nothing leaves the cluster", is_("0")),
    Field("", CONTAINER + "volumeMounts./dev/shm", "64 MB otherwise; NCCL and loaders need more"),
    Field("", CONTAINER + "volumeMounts./tmp", "Ray's session, on a read-only root"),
    Field("", CONTAINER + "volumeMounts./home/ray", "caches, on a read-only root"),
    Field(
        "",
        POD + "volumes.shm",
        "in memory",
        lambda v, _: v["emptyDir"]["medium"] == "Memory" and v["emptyDir"]["sizeLimit"],
    ),
    Field("", POD + "volumes.tmp", "ends the pod, not the node's disk", is_limited),
    Field("", POD + "volumes.home", "ends the pod, not the node's disk", is_limited),
]
HEAD = [
    Field("head", "rayStartParams.num-cpus", "no worker trains on the head", is_("0")),
    Field(
        "head",
        "template.metadata.annotations.karpenter.sh/do-not-disrupt",
        "not moved to save money",
        is_("true"),
    ),
    Field(
        "head",
        "template.metadata.annotations.cluster-autoscaler.kubernetes.io/safe-to-evict",
        "nor by this autoscaler",
        is_("false"),
    ),
    Field("head", CONTAINER + "ports.gcs-server", "KubeRay's service", is_(6379)),
    Field("head", CONTAINER + "ports.dashboard", "the operator submits there", is_(8265)),
    Field("head", CONTAINER + "ports.as-metrics", "Prometheus: the autoscaler's", is_(44217)),
    Field("head", CONTAINER + "ports.dash-metrics", "Prometheus: the dashboard's", is_(44227)),
    Field("head", CONTAINER + "env.RAY_health_check_initial_delay_ms", "5 s otherwise", least(1)),
    Field(
        "head", CONTAINER + "env.RAY_health_check_period_ms", "a silent node is noticed", least(1)
    ),
    Field("head", CONTAINER + "env.RAY_health_check_timeout_ms", "in 12 s and not 66", least(1)),
    Field(
        "head",
        CONTAINER + "env.RAY_health_check_failure_threshold",
        "not by one lost packet",
        least(2),
    ),
]
WORKER = [
    Field(
        "worker",
        "priority",
        "spot first, on-demand when there is none",
        lambda v, g: (v > 0) == (g["groupName"] == "spot"),
    ),
    Field("worker", "minReplicas", "nothing runs before a job asks", is_(0)),
    Field("worker", "replicas", "nothing runs before a job asks", is_(0)),
    Field("worker", "maxReplicas", "what a job may cost", least(1)),
    Field("worker", POD + "automountServiceAccountToken", "user code talks to no API", is_(False)),
]


def _at(place: str) -> list[Field]:
    return [Field(place, field.path, field.why, field.holds) for field in NODE]


FIELDS = [*JOB, *CLUSTER, *HEAD, *_at("head"), *WORKER, *_at("worker")]


def owners(objects: list[dict[str, Any]], field: Field) -> Iterator[dict[str, Any]]:
    """The specs or groups that must have the field."""
    spec, thing = cluster(objects), ray_object(objects)
    if field.place == "job":
        yield from [thing["spec"]] if thing["kind"] == "RayJob" else []
    elif field.place == "cluster":
        yield spec
    elif field.place == "head":
        yield spec["headGroupSpec"]
    else:
        yield from spec["workerGroupSpecs"]


def broken(objects: list[dict[str, Any]]) -> set[str]:
    """The names of the fields that are not there, or not as they must be."""
    return {
        str(field)
        for field in FIELDS
        for owner in owners(objects, field)
        if not _stands(field, owner)
    }


def take_away(owner: dict[str, Any], field: Field) -> None:
    """Remove the field, and what names it in its list."""
    *way, last = steps(field.path)
    holder = owner
    for step in way:
        holder = _inside(holder, step)
    if isinstance(holder, list):
        holder.remove(_item(holder, last))
    else:
        del holder[last]


def steps(path: str) -> list[str]:
    """The path's steps. A key may hold dots: what comes after labels or annotations is one key."""
    for word in ("annotations.", "labels."):
        before, found, key = path.partition(word)
        if found:
            return [*before.split(".")[:-1], word[:-1], key]
    return path.split(".")


def _stands(field: Field, owner: dict[str, Any]) -> bool:
    try:
        value: Any = owner
        for step in steps(field.path):
            value = _inside(value, step)
        return bool(field.holds(value, owner))
    except (KeyError, IndexError, StopIteration):
        return False


def _inside(holder: Any, step: str) -> Any:
    """A field of a mapping, or the item of a list by its index, name or mount path."""
    if not isinstance(holder, list):
        return holder[step]
    item = _item(holder, step)
    return item.get("value", item.get("containerPort", item)) if "name" in item else item


def _item(holder: list[dict[str, Any]], step: str) -> dict[str, Any]:
    if step.isdigit():
        return holder[int(step)]
    return next(i for i in holder if step in (i.get("mountPath"), i.get("name")))


def is_field(kind: Any, path: list[str]) -> bool:
    """Whether a config (a JobSpec, say) has a field at the path."""
    if not path:
        return True
    options = [kind, *typing.get_args(kind)]
    if any(typing.get_origin(option) is Mapping for option in options):
        return len(path) == 1
    for option in options:
        if dataclasses.is_dataclass(option) and path[0] in typing.get_type_hints(option):
            return is_field(typing.get_type_hints(option)[path[0]], path[1:])
    return False
