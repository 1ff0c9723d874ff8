"""A run on Ray's own autoscaler: its pending workers bring nodes, it gives whole nodes back, lost
ones are replaced."""

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


@pytest.mark.slow
def test_nodes_come_are_lost_are_replaced_and_given_back(cluster, tmp_path):
    run = trainer(tmp_path, name="run", config={"body_s": 0.1}, max_steps=100_000).start()

    def full(status, size):
        return (status["world_size"], status["phase"]) == (size, "running")

    wait_for(run, lambda s: full(s, 1))
    assert cluster.markets() == ["spot"]
    asked_at = run.status()["step"]
    run.scale(3)
    status = wait_for(run, lambda s: full(s, 3))
    assert status["step"] > asked_at + 10  # it trained while nodes came
    assert cluster.markets() == ["on-demand", "spot", "spot"]  # no third spot node is to be had

    lost = cluster.preempt("spot")
    placed = [x for x in run.events(follow=False) if x.get("event") == "WorkerPlaced"]
    victim = next(x["worker"] for x in placed if x["location"][0] == lost)
    wait_for(run, lambda s: victim not in s["workers"])
    wait_for(run, lambda s: full(s, 3))
    assert not cluster.alive(lost)
    assert cluster.markets() == ["on-demand", "spot", "spot"]
    run.scale(1)
    wait_for(run, lambda s: full(s, 1))
    wait_for(run, lambda s: cluster.markets() == ["on-demand"])  # spot nodes went first
    run.stop("enough")
    result = run.result()
    calm = trainer(tmp_path, name="calm", config={"body_s": 0}, max_steps=result.step)
    assert calm.fit(local=True).weights_sha256 == result.weights_sha256
    assert result.exact
