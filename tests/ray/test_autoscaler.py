"""A run on Ray's own autoscaler: its pending workers bring nodes, it gives whole nodes back, lost
ones are replaced.

`pytest -s` shows what each stage took, and of each worker what it waited for. On a machine that is
shared these are no numbers.
"""

import itertools
import json
import math
import statistics
import time

import pytest
import ray

import elastic_dp as edp
from tests.ray import clusters
from tests.ray.autoscaling import autoscaled
from tests.ray.jobs import wait_for
from tests.runs import Points
from tests.train.jobs import adamw, classifier, cross_entropy

pytestmark = pytest.mark.ray


@pytest.fixture
def cluster(tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        with autoscaled(tmp_path, {"spot": 2, "on-demand": 2}) as cluster:
            clusters.connect(cluster.address)
            yield cluster
            ray.shutdown()


def train(ctx):
    model = classifier()
    for _ in ctx.steps(model, adamw(model), cross_entropy):
        ctx.log({"generation": ctx.generation})
        time.sleep(ctx.config["body_s"])


def trainer(tmp_path, **options):
    return edp.ElasticTrainer(
        train,
        storage_path=str(tmp_path),
        data=edp.MapStyleData(Points(), micro_batch_size=4),
        scaling=edp.ScalingConfig(
            min_workers=1, max_workers=1, virtual_workers=4, market="spot-first"
        ),
        failure=edp.FailureConfig(heartbeat_timeout_s=15.0),  # eight raylets may share two cores
        **options,
    )


def lines(folder, name):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def arrivals(events, steps, born):
    """Return for each worker: seconds until its node was there, its process up, until it was warm,
    until the first step with it. `steps`: when, in which generation. `born`: when each node was."""
    asked = {x["worker"]: x["time"] for x in events if x.get("command") == "StartWorker"}
    home = {x["worker"]: x["home"][0] for x in events if x.get("event") == "WorkerPlaced"}
    up = {x["worker"]: x["time"] for x in events if x.get("event") == "WorkerStarted"}
    warm = {x["worker"]: x["time"] for x in reversed(events) if x.get("event") == "WorkerReady"}
    formed = [x for x in events if x.get("command") == "FormGeneration"]
    found = {}
    for worker in warm:
        first = next((x["generation"] for x in formed if worker in x["members"]), math.inf)
        trains = next((at for at, generation in steps if generation >= first), None)
        if trains is None:
            continue  # it stood by to the end
        node = max(asked[worker], born[home[worker]])
        times = asked[worker], node, up[worker], warm[worker], trains
        legs = [later - earlier for earlier, later in itertools.pairwise(times)]
        found[worker] = dict(zip(("node", "process", "warm-up", "join"), legs, strict=True))
    return found


def waits(folder, born):
    """Return the wait of each worker that trained."""
    steps = [(x["time"], x["generation"]) for x in lines(folder, "metrics.jsonl")]
    return arrivals(lines(folder, "events.jsonl"), steps, born)


def pauses(folder):
    """Milliseconds from the last step of each generation to the first of the next, beyond a median
    step of that."""
    steps = lines(folder, "metrics.jsonl")
    gaps = [
        (x["generation"], y["generation"], 1e3 * (y["time"] - x["time"]))
        for x, y in itertools.pairwise(steps)
    ]
    medians = {
        of: statistics.median(gap for old, new, gap in gaps if old == new == of)
        for of in {new for old, new, _ in gaps if old == new}
    }
    return {new: round(gap - medians[new]) for old, new, gap in gaps if old != new in medians}


@pytest.mark.slow
def test_nodes_come_are_lost_are_replaced_and_given_back(cluster, tmp_path):
    run = trainer(tmp_path, name="run", config={"body_s": 0.1}, max_steps=100_000).start()
    began = time.monotonic()

    def mark(what):
        print(f"{time.monotonic() - began:5.1f} s: {what}: {cluster.markets()}")

    def full(status, size):
        return (status["world_size"], status["phase"]) == (size, "running")

    wait_for(run, lambda s: full(s, 1))
    mark("one")
    assert cluster.markets() == ["spot"]
    asked_at = run.status()["step"]
    run.scale(3)
    status = wait_for(run, lambda s: full(s, 3))
    mark("three")
    assert status["step"] > asked_at + 10  # it trained while nodes came
    assert cluster.markets() == ["on-demand", "spot", "spot"]  # no third spot node is to be had

    lost = cluster.preempt("spot")
    placed = [x for x in run.events(follow=False) if x.get("event") == "WorkerPlaced"]
    victim = next(x["worker"] for x in placed if x["location"][0] == lost)
    wait_for(run, lambda s: victim not in s["workers"])
    mark("lost")
    wait_for(run, lambda s: full(s, 3))
    assert not cluster.alive(lost)
    assert cluster.markets() == ["on-demand", "spot", "spot"]
    mark("three again")

    run.scale(1)
    wait_for(run, lambda s: full(s, 1))
    mark("one again")
    wait_for(run, lambda s: cluster.markets() == ["on-demand"])  # spot nodes went first
    mark("given back")
    run.stop("enough")
    result = run.result()
    mark("ended")
    found = waits(tmp_path / "run", cluster.born())
    assert len(found) >= 4  # one was lost
    for worker, legs in found.items():
        print(worker, {leg: round(seconds, 2) for leg, seconds in legs.items()})
        assert min(legs.values()) >= 0, legs
    print("pauses, ms, by generation:", pauses(tmp_path / "run"))
    calm = trainer(tmp_path, name="calm", config={"body_s": 0}, max_steps=result.step)
    assert calm.fit(local=True).weights_sha256 == result.weights_sha256
    assert result.exact
