"""The shipped manifest, Ray's KubeRay autoscaler and our job together, on one machine:
`emulator.py` stands for the rest.

    python -m pytest -m slow tests/k8s/test_emulated.py

The test with a job is left out of the default run: it starts four Ray nodes and six processes with
torch, and wants two cores of its own. The other has one actor. Of the manifest two numbers are
changed: idle times, and the job's epochs.
"""

import functools
import json
import re
import shlex
import subprocess
import time
from datetime import datetime

import pytest

from tests.k8s.emulator import Emulator
from tests.k8s.manifests import ROOT, build, cluster, environment, groups, ray_object
from tests.k8s.pods import HEAD, Pod

PATIENCE_S = 240.0
EPOCHS = "--epochs 5"
pytestmark = pytest.mark.ray
LOOK = """
import json, os
from ray._raylet import GcsClient
nodes = GcsClient(os.environ["RAY_ADDRESS"]).get_all_node_info().values()
alive = [[dict(node.labels), dict(node.resources_total)] for node in nodes if node.state == 0]
print("NODES", json.dumps(alive))
"""


ACTOR = """
import os, ray
ray.init(log_to_driver=False)
@ray.remote(num_cpus=1, max_restarts=-1, max_task_retries=-1)
class Actor:
    def where(self):
        return os.environ["RAY_CLOUD_INSTANCE_ID"], os.getuid()
actor = Actor.remote()
first = now = ray.get(actor.where.remote())
print("ON", *first, flush=True)
while now == first:
    try:
        now = ray.get(actor.where.remote(), timeout=1)
    except ray.exceptions.RayError:
        pass
print("ON", *now, flush=True)
"""


@pytest.mark.slow
def test_a_node_comes_is_lost_comes_again_and_goes(tmp_path):
    objects = build("overlays/cpu-smoke")
    spec = cluster(objects)
    spec["autoscalerOptions"]["idleTimeoutSeconds"] = 3
    with Emulator(spec, {"/runs": tmp_path}, ROOT) as emulator:
        job = emulator.machine.run("job", f"python -c {shlex.quote(ACTOR)}")
        wait = functools.partial(_until, emulator, job)
        wait(lambda: "ON" in emulator.machine.said("job"))
        [first] = emulator.workers()
        assert f"ON {first.name} 1000\n" in emulator.machine.said("job")
        _nodes_are_as_the_manifest_says(emulator, groups(objects)["spot"])

        first.lose()
        wait(lambda: job.poll() == 0)
        # The operator replaced it. A node that is not up within Ray's 30 s ends, and is replaced,
        # too.
        assert {pod.group for pod in emulator.ever if pod.group != HEAD} == {"spot"}
        assert len(emulator.ever) >= 3

        wait(lambda: len(emulator.pods) == 1)  # the head: the autoscaler took the idle one away
        deleted = emulator.deleted_by_the_autoscaler()
        assert any(f"ON {second} 1000\n" in emulator.machine.said("job") for second in deleted)


@pytest.mark.slow
def test_the_manifest_the_autoscaler_and_the_job_together(tmp_path):
    objects = build("overlays/cpu-smoke")
    spec = cluster(objects)
    spec["autoscalerOptions"]["idleTimeoutSeconds"] = 5
    with Emulator(spec, {"/runs": tmp_path}, ROOT) as emulator:
        job = _start(emulator, objects)
        wait = functools.partial(_until, emulator, job)
        wait(lambda: _trains_together(tmp_path / "digits"))
        assert {pod.group for pod in emulator.workers()} == {"spot"}  # it was asked first

        lost = emulator.workers()[0]
        lost.lose()
        wait(lambda: job.poll() == 0)
        came = emulator.ever[-1]  # the operator's part
        print("seconds to the first step:", _arrival(emulator, came, tmp_path / "digits"))

        _is_as_undisturbed(emulator, tmp_path)
        wait(lambda: len(emulator.pods) == 1)  # the head
        assert came.name in emulator.deleted_by_the_autoscaler()
        assert not any(pod.was_killed for pod in emulator.ever)  # Ray ended within the grace


@pytest.mark.slow
def test_no_right_then_no_spot_then_a_preemption(tmp_path):
    """First the autoscaler may not patch, and the run says so in its words; then there is one spot
    machine only, and then that is taken back with notice."""
    objects = build("overlays/cpu-smoke")
    spec = cluster(objects)
    spec["autoscalerOptions"]["idleTimeoutSeconds"] = 5
    _set(spec["autoscalerOptions"], "RAY_AUTOSCALER_RECONCILE_ALLOCATE_STATUS_TIMEOUT_S", "45")
    with Emulator(spec, {"/runs": tmp_path}, ROOT) as emulator:
        emulator.refuses["PATCH"] = 403
        emulator.capacity["spot"] = 1
        job = _start(emulator, objects, "--set scaling.market=spot-first")
        wait = functools.partial(_until, emulator, job)
        wait(lambda: "403 Client Error: Forbidden" in _events(tmp_path / "digits"))
        emulator.refuses.clear()

        wait(lambda: _trains_together(tmp_path / "digits"))
        assert sorted(pod.group for pod in emulator.running()) == ["on-demand", "spot"]

        [spot] = emulator.running("spot")
        emulator.preempt(spot)
        wait(lambda: emulator.running("spot") not in ([], [spot]))
        wait(lambda: job.poll() == 0)
        assert '"event": "DrainNoticed"' in _events(tmp_path / "digits")
        assert not spot.was_killed
        _is_as_undisturbed(emulator, tmp_path)


def _start(emulator: Emulator, objects: list, *more: str) -> subprocess.Popen[bytes]:
    """The job as the manifest starts it; but it needs both workers at any time, so that it cannot
    be over before what is to happen to it."""
    words, script = ray_object(objects)["spec"]["entrypoint"].split(" -- ")
    sets = " ".join(["--set scaling.min_workers=2", *more])
    return emulator.machine.run("job", f"{words} {sets} -- {script} {EPOCHS}")


def _is_as_undisturbed(emulator: Emulator, folder) -> None:
    data = f"--data {folder}/digits-data {EPOCHS}"
    alone = emulator.machine.run("alone", f"python jobs/digits.py --local {data}")
    assert alone.wait() == 0, emulator.machine.said("alone")
    assert _digest(emulator.machine.said("job")) == _digest(emulator.machine.said("alone"))


def _arrival(emulator: Emulator, pod: Pod, run) -> dict[str, float]:
    """Seconds of each stage of a pod's worker, the last that came; steps are logged once an epoch,
    so `logged` is at most one epoch late."""
    up = re.search(
        r"^(\S+ \S+)\t\w+ \S+ -- Ray runtime started", emulator.machine.said(pod.name), re.M
    )
    at = {"node": datetime.strptime(up[1], "%Y-%m-%d %H:%M:%S,%f").timestamp()}
    for line in map(json.loads, _events(run).splitlines()):
        if line.get("event") == "WorkerStarted":
            at["process"] = line["time"]
        elif line.get("event") == "WorkerReady":
            at["warm-up"] = line["time"]
        elif line.get("command") == "FormGeneration":
            at["join"] = line["time"]
    logged = [json.loads(line)["time"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    at["logged"] = next(time for time in logged if time > at["join"])
    return {
        name: round(now - before, 1)
        for (name, now), before in zip(at.items(), [pod.started_at, *at.values()], strict=False)
    }


def _events(run) -> str:
    path = run / "events.jsonl"
    return path.read_text() if path.exists() else ""


def _set(container: dict, name: str, value: str) -> None:
    [variable] = [variable for variable in container["env"] if variable["name"] == name]
    variable["value"] = value


def _trains_together(run) -> bool:
    """A step was logged after a generation of two had begun."""
    lines = [json.loads(line) for line in _events(run).splitlines()]
    formed = [line for line in lines if line.get("command") == "FormGeneration"]
    metrics = run / "metrics.jsonl"
    if not formed or not metrics.exists():
        return False
    logged = metrics.read_text().splitlines()
    return bool(logged) and json.loads(logged[-1])["time"] > formed[-1]["time"]


def _nodes_are_as_the_manifest_says(emulator: Emulator, group: dict) -> None:
    """Check the nodes as Ray itself sees them: the group's labels and resources, under the pods'
    names."""
    assert emulator.machine.run("look", f"python -c {shlex.quote(LOOK)}").wait() == 0, (
        emulator.machine.said("look")
    )
    looked = emulator.machine.said("look")
    nodes = json.loads(re.search(r"^NODES (.*)$", looked, re.M)[1])
    workers = [node for node in nodes if node[1].get("CPU")]
    assert len(workers) == len(nodes) - 1 == len(emulator.workers())  # the head has no CPU
    for labels, resources in workers:
        assert labels["ray.io/market-type"] == group["labels"]["ray.io/market-type"]
        assert labels["ray.io/node-group"] == group["groupName"]
        assert resources["CPU"] == 1 and resources["memory"] == 3 * 2**30
    container = group["template"]["spec"]["containers"][0]
    for pod in emulator.workers():
        assert environment(container).items() <= pod.environment().items()
        assert pod.user() == group["template"]["spec"]["securityContext"]["runAsUser"] == 1000
        assert pod.grace_s == group["template"]["spec"]["terminationGracePeriodSeconds"]


def _until(emulator: Emulator, job: subprocess.Popen[bytes], true) -> None:
    end = time.monotonic() + PATIENCE_S
    while not true():
        assert not job.poll(), emulator.machine.said("job")
        assert time.monotonic() < end, _told(emulator)
        time.sleep(0.1)


def _told(emulator: Emulator) -> str:
    pods = list(emulator.pods.values())
    said = emulator.machine.said
    return f"{pods}\n{emulator.patches}\n{said('job')}\n{said('autoscaler')[-3000:]}"


def _digest(text: str) -> str:
    return re.search(r"weights sha256 (\w{64})", text)[1]
