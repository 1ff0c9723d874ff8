"""The whole path on a real Ray: detached actors, a real kill, and the weights of the undisturbed run."""

import os
import signal
import time

import pytest

import elastic_dp as edp
from elastic_dp.errors import ClusterError, ModelError, SpecError, UserCodeError
from tests.runs import Points
from tests.train.jobs import Average, adamw, classifier, cross_entropy, hold

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]


@pytest.fixture(scope="module", autouse=True)
def cluster():
    import tests

    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": os.path.dirname(os.path.dirname(tests.__file__))}},
    )
    yield
    ray.shutdown()


def train(ctx):
    model = classifier()
    optimizer = adamw(model)
    average = Average(model)
    for step in ctx.steps(model, optimizer, cross_entropy, state={"ema": average}, clip_norm=1.0):
        average.update(model)
        ctx.log({"loss": step.loss, "world": ctx.world_size})
        hold(ctx, step)


def trainer(tmp_path, name, train=train, steps=60, workers=3, standby=0, **config):
    return edp.ElasticTrainer(
        train,
        name=name,
        storage_path=str(tmp_path),
        config=config,
        data=edp.MapStyleData(Points(), micro_batch_size=4),
        scaling=edp.ScalingConfig(
            min_workers=1, max_workers=workers, virtual_workers=8, standby=standby
        ),
        max_steps=steps,
    )


def wait_for(run, condition, timeout_s=60.0):
    until = time.monotonic() + timeout_s
    while not condition(status := run.status()):
        assert time.monotonic() < until, status
        time.sleep(0.02)
    return status


def test_a_killed_worker_costs_nothing_but_its_step(tmp_path):
    calm = trainer(tmp_path, "calm").fit(local=True)
    run = trainer(tmp_path, "kill", hold={10: 3, 40: 3}, standby=1).start()
    wait_for(run, lambda s: s["world_size"] == 3)
    before = run.pids()
    victim = sorted(before)[1]
    os.kill(before[victim], signal.SIGKILL)
    wait_for(run, lambda s: s["world_size"] == 3 and victim not in s["workers"])
    after = run.pids()
    assert all(after[w] == pid for w, pid in before.items() if w in after and w != victim)
    assert len(set(before) & set(after)) >= 2  # survivors kept their processes
    result = run.result()
    assert result.weights_sha256 == calm.weights_sha256
    assert result.exact
    assert result.generations >= 2
    lines = (tmp_path / "kill" / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 60  # once per step


def test_scaling_up_and_down(tmp_path):
    calm = trainer(tmp_path, "calm", steps=150).fit(local=True)
    hold_at = {10: 2} | dict.fromkeys((100, 115, 130, 145), 3)  # joiners may come one by one
    run = trainer(tmp_path, "scale", steps=150, workers=2, hold=hold_at).start()
    with pytest.raises(SpecError, match=r"within 1\.\.8"):
        run.scale(9)
    wait_for(run, lambda s: s["world_size"] == 2)
    run.scale(1)
    wait_for(run, lambda s: s["world_size"] == 1)
    run.scale(3)
    wait_for(run, lambda s: s["world_size"] == 3)
    assert run.result().weights_sha256 == calm.weights_sha256


def test_user_errors_arrive_with_their_own_traceback(tmp_path):
    def broken(ctx):
        model = classifier()
        for step in ctx.steps(model, adamw(model), cross_entropy):
            if step.number == 3:
                {}["missing key"]

    with pytest.raises(UserCodeError, match="missing key") as caught:
        trainer(tmp_path, "broken", broken).fit()
    assert str(caught.value).count('{}["missing key"]') == 1


def test_models_that_differ_between_workers(tmp_path):
    def differing(ctx):
        model = classifier(16) if ctx.is_source else classifier(17)
        for step in ctx.steps(model, adamw(model), cross_entropy):
            hold(ctx, step)

    with pytest.raises(ModelError, match=r"names, shapes or dtypes .* differ"):
        trainer(tmp_path, "differing", differing, hold={3: 3}).fit()


def test_a_live_run_cannot_be_started_twice(tmp_path):
    run = trainer(tmp_path, "twice", body_s=0.2, workers=1).start()
    with pytest.raises(ClusterError, match="live"):
        trainer(tmp_path, "twice", body_s=0.2, workers=1).start()
    run.stop("enough")
    assert run.result().reason == "enough"


def test_more_workers_than_fit_hold_nobody_up(tmp_path):
    calm = trainer(tmp_path, "calm").fit(local=True)
    result = trainer(tmp_path, "pending", workers=8).fit()  # four CPUs: four stay pending
    assert result.weights_sha256 == calm.weights_sha256


def test_resources_that_no_node_has_are_said_and_waited_for(tmp_path):
    greedy = trainer(tmp_path, "greedy")
    scaling = edp.ScalingConfig(virtual_workers=8, resources_per_worker={"CPU": 100})
    object.__setattr__(greedy.spec, "scaling", scaling)
    run = greedy.start()
    said = next(x["text"] for x in run.events() if "no node of this cluster" in x.get("text", ""))
    assert "'CPU': 100" in said
    assert run.status()["phase"] != "over"
    run.stop("nobody will come")
    assert run.result().step == 0
