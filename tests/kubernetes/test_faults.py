"""Faults that only a cluster has, one after the other in one run, from `kubectl apply` to weights
that are those of one process. Writes benchmarks/results/kubernetes.json.

    KUBE_CLUSTER=… python -m pytest -m slow tests/kubernetes/test_faults.py
"""

import dataclasses
import itertools
import json
import os
import re
import subprocess
import time
import urllib.error
import urllib.request

import pytest
import yaml

from tests.k8s.manifests import ROOT, _kubectl, build, ray_object
from tests.kubernetes.runs import PATIENCE_S, RESULTS, TOKEN, prepared, run_alone, until, where
from tests.kubernetes.server import for_kuberay, kubectl

PROGRAM = os.environ.get("KUBE_CLUSTER", "")
PORT = 18265
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),  # the first test waits for the image
    pytest.mark.skipif(not PROGRAM, reason="faults of nodes: set KUBE_CLUSTER"),
]


@dataclasses.dataclass(frozen=True)
class Fault:
    """`do`, and when the run has said `told`, or after so many seconds, `mend`: lines of bash.
    `told` is a regular expression. Then all workers train again, in a new generation if the fault
    `ends` the one that there is."""

    do: str
    told: str = ""
    mend: str = "true"
    after_s: float = 0.0
    ends: bool = True


OFF = "--force --grace-period=0"
WAITS = "it has asked for nodes that are not up yet"
DRAIN = "--ignore-daemonsets --delete-emptydir-data --timeout=300s"
FUNCTIONS = r"""
kubectl() { command %(kubectl)s -n training "$@"; }
cluster() { %(program)s "$@"; }
program() { kill -$2 $(cat $STATE/$1.pid); }
group() {  # NUMBER OPERATION FIELD [VALUE]
  kubectl patch raycluster $CLUSTER --type=json \
    -p "[{\"op\": \"$2\", \"path\": \"/spec/workerGroupSpecs/$1/$3\"${4:+, \"value\": $4}}]"
}
image() { for n in 0 1; do group $n replace template/spec/containers/0/image '"'$1'"'; done; }
new_token() {
  token='"auth_token": "'$(openssl rand -hex 32)'"'
  kubectl patch secret elastic-dp-auth -p "{\"stringData\": {$token}}"
}
urgent() {
  kubectl create -f - <<END
apiVersion: v1
kind: Pod
metadata: {name: urgent}
spec:
  priorityClassName: elastic-dp-head
  nodeSelector: {kubernetes.io/hostname: $NODE}
  terminationGracePeriodSeconds: 0
  securityContext: {runAsNonRoot: true, runAsUser: 1000, seccompProfile: {type: RuntimeDefault}}
  containers:
  - name: one
    image: elastic-dp:cpu
    command: [sleep, "3600"]
    resources: {requests: {cpu: 1500m}}
    securityContext: {allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}}
END
}
loss() {  # of packets from and to a node: -I, or -D to end it
  ip netns exec $NODE iptables $1 FORWARD -m statistic --mode random --probability 0.05 -j DROP
}
"""
FAULTS = {
    "a node has no power, and its object stays": Fault(
        "cluster kill-node $N",
        told=r"node kn\d has not answered since .* run: kubectl delete node kn\d",
        mend="kubectl delete node $NODE",
    ),
    "a node is added, and one is drained": Fault(
        f"cluster start-node $GONE; kubectl drain $NODE {DRAIN}",
        told="drain",
        mend="kubectl uncordon $NODE",
    ),
    "the head is ended by force while the operator is away": Fault(
        f"cluster kill-operator; kubectl delete pod $HEAD {OFF}",
        mend="cluster start-operator",
        after_s=20,
        told="going on from step",
    ),
    "the head's node is drained": Fault(
        f"kubectl drain $HEAD_NODE {DRAIN}",
        mend="kubectl uncordon $HEAD_NODE",
        after_s=45,
        told="going on from step",
    ),
    "no node takes a pod": Fault(
        f"kubectl cordon kn1 kn2 kn3; kubectl delete pod $WORKER {OFF}",
        told=WAITS,
        mend="kubectl uncordon kn1 kn2 kn3",
    ),
    "an image cannot be pulled": Fault(
        f"image elastic-dp:gone; kubectl delete pod $WORKER {OFF}",
        told=WAITS,
        mend="image elastic-dp:cpu; kubectl delete pod --field-selector status.phase=Pending "
        f"-l ray.io/node-type=worker {OFF}",
    ),
    "a quota is exceeded": Fault(
        f"kubectl create quota pods --hard=pods=2; kubectl delete pod $WORKER {OFF}",
        told="not up yet|cannot add nodes",
        mend="kubectl delete quota pods",
    ),
    "a container uses more memory than its limit": Fault(
        "kubectl exec $WORKER -c ray-worker -- bash -c 'head -c 4G /dev/zero > /dev/shm/much'",
        told="ran low on memory",
    ),
    "a pod is evicted because its volume is over its size": Fault(
        "kubectl exec $WORKER -c ray-worker -- bash -c 'head -c 2G /dev/zero > /tmp/much'",
        told=WAITS,
    ),
    "probes of a pod fail for a minute": Fault(
        "kubectl exec $WORKER -c ray-worker -- pkill -STOP -f ^ray::DashboardAgent",
        mend="kubectl exec $WORKER -c ray-worker -- pkill -CONT -f ^ray::DashboardAgent",
        after_s=60,
        ends=False,
    ),
    "the Kubernetes API is away for two minutes": Fault(
        "program kube-apiserver STOP",
        mend="program kube-apiserver CONT",
        after_s=120,
        ends=False,
    ),
    "the operator ends while it replaces a head": Fault(
        f"kubectl delete pod $HEAD {OFF}; sleep 8; cluster kill-operator",
        mend="cluster start-operator",
        after_s=30,
        told="going on from step",
    ),
    "a worker is replaced while DNS answers thirty seconds late": Fault(
        f"program coredns STOP; kubectl delete pod $WORKER {OFF}",
        mend="program coredns CONT",
        after_s=30,
    ),
    "a node loses one packet in twenty for a minute": Fault(
        "loss -I",
        mend="loss -D",
        after_s=60,
        ends=False,
    ),
    "a second run starts and ends in the namespace": Fault(
        "kubectl apply -f $FOLDER/second.yaml",
        mend="kubectl wait --for=jsonpath={.status.jobStatus}=SUCCEEDED rayjob/second "
        "--timeout=400s; kubectl delete -f $FOLDER/second.yaml",
        after_s=1,
        ends=False,
    ),
    "the run is scaled to one worker and back": Fault(
        "kubectl exec $HEAD -c ray-head -- elastic-dp scale digits 1",
        mend="kubectl exec $HEAD -c ray-head -- elastic-dp scale digits 2",
        after_s=100,
    ),
    "a node is cut off for a minute": Fault(
        "cluster cut-node $N",
        mend="cluster mend-node $N",
        after_s=60,
    ),
    "a pod of a higher priority needs the room": Fault(
        "urgent",
        told="drain",
        mend="kubectl delete pod urgent",
    ),
    "there are no spot machines": Fault(
        """group 0 add priority 10; group 1 add priority 0;
        group 0 add template/spec/nodeSelector '{"market": "spot"}';"""
        f"kubectl delete pod $WORKER {OFF}",
        told=WAITS,
        mend="kubectl wait --for=delete --timeout=300s "
        "pod --field-selector=status.phase=Pending -l ray.io/group=spot; "
        "group 0 remove template/spec/nodeSelector",
    ),
    "the RayJob is deleted, and a new cluster takes over": Fault(
        "kubectl delete rayjob digits",
        mend="kubectl apply -f $FOLDER/job.yaml",
        after_s=10,
        told="going on from step",
    ),
    "maxReplicas is edited to zero and back": Fault(
        "group 0 replace maxReplicas 0; group 1 replace maxReplicas 0",
        mend="group 0 replace maxReplicas 2; group 1 replace maxReplicas 2",
        after_s=60,
    ),
    "the token is changed": Fault(
        f"new_token; kubectl delete pod $WORKER {OFF}",
        told=WAITS,
        mend="kubectl delete pod -l app.kubernetes.io/instance=digits",
    ),
    "a node has no power, and admin/lost-nodes frees its pods": Fault(
        "kubectl cordon $NODE; kubectl apply -k k8s/admin/lost-nodes; "
        "kubectl set env deployment/lost-nodes MINUTES=0.2; "
        "kubectl rollout status deployment/lost-nodes; cluster kill-node $N",
        mend="kubectl wait --for=delete pod/$WORKER --timeout=400s",
        after_s=30,
    ),
}
NOT_DONE = {
    "a node is out of memory or disk": "the nodes share those of one machine; a volume over its "
    "size takes the same way",
}
IN_PICTURE = list(FAULTS)[:3]
done = {}


def change_crd(operation, value):
    """KubeRay 1.6 has no `priority` of worker groups, but Ray's autoscaler has."""
    _, said = kubectl("get", "crd", "rayclusters.ray.io", "-o", "json")
    names = [version["name"] for version in json.loads(said)["spec"]["versions"]]
    group = "properties/spec/properties/workerGroupSpecs/items/properties/priority"
    path = f"/spec/versions/{names.index('v1')}/schema/openAPIV3Schema/{group}"
    patch = json.dumps([{"op": operation, "path": path, "value": value}])
    code, said = kubectl("patch", "crd", "rayclusters.ray.io", "--type=json", "-p", patch)
    assert code == 0, said


def shell(lines, names):
    functions = FUNCTIONS % {"kubectl": _kubectl(), "program": PROGRAM}
    return subprocess.Popen(["bash", "-c", functions + lines], cwd=ROOT, env=os.environ | names)


def write_objects(folder, objects):
    """The run's objects, and those of a second one on the same volume."""
    job = ray_object(objects)["spec"]
    job["entrypoint"] = job["entrypoint"].replace("jobs/digits.py", "/runs/job.py")
    ray = job["rayClusterSpec"]
    for variable in ray["autoscalerOptions"]["env"]:
        if variable["name"] == "RAY_AUTOSCALER_RECONCILE_ALLOCATE_STATUS_TIMEOUT_S":
            variable["value"] = "60"
    for group in ray["workerGroupSpecs"]:
        volumes = group["template"]["spec"]["volumes"]
        [tmp] = [volume["emptyDir"] for volume in volumes if volume["name"] == "tmp"]
        tmp["sizeLimit"] = "1Gi"
    (folder / "job.yaml").write_text(yaml.safe_dump_all(objects))
    others = [one for one in objects if one["kind"] != "PersistentVolumeClaim"]
    second = yaml.safe_dump_all(others, width=1000).replace("digits", "second")
    few = "--set data.epochs=4 --set scaling.max_workers=1 -- --data"
    (folder / "second.yaml").write_text(second.replace("-- --data", few))
    (folder / "second-data").mkdir()
    (folder / "second-data").chmod(0o777)
    (folder / "second-data/finish").touch()


@pytest.fixture(scope="module")
def run(image, namespace, has_priorities):
    """The run, when both of its workers train."""
    objects = for_kuberay(build("overlays/cpu-smoke"), has_priorities)
    with prepared() as there:
        write_objects(there.folder, objects)
        code, said = kubectl("apply", "-f", str(there.folder / "job.yaml"))
        assert code == 0, said
        if not has_priorities:
            change_crd("add", {"type": "integer"})
        try:
            until(lambda: there.full_since(0), lambda: kubectl("get", "pods", "-n", "training")[1])
            yield there
        finally:
            if not has_priorities:
                change_crd("remove", None)
            delete(there.folder)


def delete(folder):
    words = "--ignore-not-found", "--timeout=200s"
    return kubectl("delete", "-n", "training", "-f", str(folder / "job.yaml"), *words, seconds=240)


def test_dashboard_by_port_forward_asks_for_the_token(run):
    head = until(where, lambda: "no head")["HEAD"]
    words = "port-forward", head, f"{PORT}:8265"
    command = [_kubectl(), "-n", "training", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as forward:
        try:
            forward.stdout.readline()
            url = f"http://127.0.0.1:{PORT}/api/version"
            with pytest.raises(urllib.error.HTTPError, match="401"):
                urllib.request.urlopen(url, timeout=20)
            request = urllib.request.Request(url, headers={"Authorization": f"Bearer {TOKEN}"})
            with urllib.request.urlopen(request, timeout=20) as answer:
                assert json.load(answer)["ray_version"] == "2.60.0"
        finally:
            forward.kill()


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("timeout 10 kubectl -n training get rayjob digits --watch || true", "RUNNING"),
        ("edp digits status digits", "step"),
        ("edp digits logs digits --events --tail 5", "FormGeneration"),
        ("edp digits checkpoints save digits", "a checkpoint of one of the next steps"),
        ("edp digits checkpoints list /runs/digits", "saved"),
    ],
)
def test_everyday_command_of_the_readme(run, command, said):
    [block] = re.findall(r"```bash\n(head_of.*?)```", (ROOT / "k8s/README.md").read_text(), re.S)
    names = os.environ | until(where, lambda: kubectl("get", "pods", "-n", "training")[1])
    found = f'kubectl() {{ command {_kubectl()} "$@"; }}; export -f kubectl\n'
    lines = found + block + command
    done = subprocess.run(["bash", "-c", lines], env=names, capture_output=True, text=True)
    assert done.returncode == 0 and said in done.stdout, (done.stdout, done.stderr)


@pytest.mark.parametrize("name", FAULTS)
def test_run_goes_on_after(run, name):
    fault = FAULTS[name]
    names = until(where, lambda: kubectl("get", "pods", "-n", "training")[1])
    names |= {"FOLDER": str(run.folder)}
    start = time.time()
    first = shell(fault.do, names)

    def state():
        texts = [line["text"] for line in run.lines("events", start) if "text" in line]
        return f"{texts}\n{kubectl('get', 'pods', '-n', 'training', '-o', 'wide')[1]}"

    if fault.after_s:
        time.sleep(fault.after_s)
    else:
        until(lambda: run.told(fault.told, start), state)
    mend = shell(fault.mend, names)
    mend.wait(PATIENCE_S)
    first.wait(PATIENCE_S)
    told = until(lambda: run.told(fault.told, start), state) if fault.told else None
    since = start if fault.ends else time.time()
    full = until(lambda: run.full_since(since, fault.ends), state)
    steps = run.lines("metrics", start - 5)
    pauses = [after["time"] - before["time"] for before, after in itertools.pairwise(steps)]
    again = sum(max(0, b["step"] - a["step"] + 1) for b, a in itertools.pairwise(steps))
    done[name] = {
        "done": " ".join(fault.do.split()),
        "mended": fault.mend,
        "told": told,
        "pause_s": round(max(pauses), 1),
        "full_size_s": round(full - start, 1) if fault.ends else None,
        "steps_done_again": again,
    }
    if name in IN_PICTURE:
        run.pictured.append((start, full, name))
        run.kubernetes = json.loads(kubectl("get", "events", "-n", "training", "-o", "json")[1])[
            "items"
        ]
    print(name, json.dumps(done[name], indent=1))
    assert again == 0 or f"$HEAD {OFF}" in fault.do or names["WORKERS_ON_NODE"] == "2"


def test_weights_are_those_of_one_process(run, tmp_path):
    result = run.finish(lambda: kubectl("get", "rayjob", "-n", "training")[1])
    assert result["weights_sha256"] in run_alone(tmp_path)
    _, versions = kubectl("version")
    RESULTS.write_text(
        json.dumps(
            {
                "date": time.strftime("%Y-%m-%d"),
                "versions": re.findall(r"(?:Server|Client) Version.*", versions),
                "weights": result["weights_sha256"],
                "faults": done,
                "not_done": NOT_DONE,
                "timeline": run.timeline(),
            },
            indent=2,
        )
        + "\n"
    )


def test_delete_leaves_nothing(run):
    code, said = delete(run.folder)
    assert code == 0, said
    kinds = "rayjobs,rayclusters,pods,services,networkpolicies,poddisruptionbudgets,"
    get = "get", kinds + "serviceaccounts,roles,rolebindings", "-n", "training", "-o", "name"
    until(lambda: None if "digits" in kubectl(*get)[1] else "", lambda: kubectl(*get)[1])
