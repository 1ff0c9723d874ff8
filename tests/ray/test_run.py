"""The whole path on a real Ray: detached actors, a real kill, and the weights of the undisturbed
run."""

import dataclasses
import importlib
import json
import os
import signal
from itertools import accumulate

import pytest
import ray

import elastic_dp as edp
from elastic_dp.checkpoint.catalog import Catalog
from elastic_dp.errors import ClusterError
from elastic_dp.storage import Store
from tests.patience import eventually
from tests.ray import clusters
from tests.ray.jobs import (
    FOR_EVER,
    is_whole,
    members,
    pid_of_controller,
    pids_of,
    trainer,
    undisturbed,
    wait_for,
)
from tests.runs import PATIENT
from tests.storage.conftest import send
from tests.storage.servers import s3_options

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module", autouse=True)
def cluster():
    with clusters.shared():
        yield


def test_a_jump_of_the_loss_rewinds_the_run(tmp_path):
    """A loss above the median of the two before it, once; the weights are those of one process."""
    rule = edp.Rewind(factor=1.0, window=2, before=1, after=1, at_most=1)
    failure = dataclasses.replace(PATIENT, on_spike=rule)
    alone, jumps = (
        trainer(tmp_path, name, steps=20, workers=2, every_steps=2, failure=failure).fit(local)
        for name, local in (("alone", True), ("jumps", False))
    )
    left_out = Catalog(Store(jumps.path)).left_out()
    assert len(left_out) == 1 and left_out == Catalog(Store(alone.path)).left_out()
    assert jumps.weights_sha256 == alone.weights_sha256


def test_a_killed_worker_costs_nothing_but_its_step(tmp_path):
    run = trainer(tmp_path, "kill", steps=FOR_EVER, workers=2, standby=1, body_s=0.2).start()
    whole = wait_for(run, lambda s: is_whole(s, 2) and "ready" in s["workers"].values())
    before = pids_of(run, whole["workers"])
    victim = members(whole)[-1]
    os.kill(before[victim], signal.SIGKILL)
    again = wait_for(run, lambda s: is_whole(s, 2) and victim not in s["workers"])
    after = members(again)
    survivors = [worker for worker in after if worker in before]
    assert len(survivors) == 2  # the standby, too
    assert pids_of(run, survivors) == {worker: before[worker] for worker in survivors}
    logs = tmp_path / "kill" / "logs"
    for name in (f"{victim}.last.log", *(f"{worker}.log" for worker in after)):
        eventually(lambda n=name: "the words of a worker" in read(logs / n), run.status)
    wait_for(run, lambda s: s["step"] >= again["step"] + 5)
    run.stop("enough")
    result = run.result()
    assert result.weights_sha256 == undisturbed(tmp_path, result.step)
    assert result.exact
    assert result.generations >= 2 and result.workers_lost == 1
    records = [json.loads(line) for line in read(tmp_path / "kill/metrics.jsonl").splitlines()]
    assert [x["best"] for x in records] == list(accumulate([x["loss"] for x in records], min))
    assert [record["step"] for record in records] == list(range(1, result.step + 1))


def read(path):
    return path.read_text() if path.exists() else ""


def test_a_name_is_one_run(tmp_path):
    """On a cluster at a time; when one has ended, the next start goes on, and a finished one keeps
    its result."""
    first = trainer(tmp_path, "one", steps=FOR_EVER).start()
    with pytest.raises(ClusterError, match=f"live on this cluster, at {tmp_path}/one"):
        trainer(tmp_path / "elsewhere", "one").start()
    with pytest.warns(UserWarning, match=r"live with other limits .*max_steps=1.*not .*=50"):
        again = trainer(tmp_path, "one", steps=50).start()
    again.stop("before it began")
    assert ray.get(first.controller.wait.remote(None)) is not None

    with pytest.warns(UserWarning, match="max_steps is 60 now, was 100000"):
        second = trainer(tmp_path, "one").start()
    assert ray.get(second.controller.wait.remote(None)) is not None  # nobody takes the result
    third = trainer(tmp_path, "one").start()
    assert third.status()["reason"].startswith("finished after step 60")
    assert third.result() == second.result() == first.result()  # whose controller is gone
    assert set(third.status()) == set(second.status())
    with pytest.raises(ClusterError, match="is over"):
        third.stop()


def test_a_run_whose_storage_is_reached_by_options_survives_its_controller(
    moto, tmp_path, monkeypatch
):
    """The options reach the controller, its successor and the workers; nothing is in the
    environment."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    options = s3_options(moto)
    send("PUT", f"{moto}/by-options")
    path, every = "s3://by-options/runs", {"every_steps": 10, "body_s": 0.1}
    run = trainer(path, "far", steps=FOR_EVER, storage_options=options, **every).start()
    wait_for(run, lambda s: s["step"] >= 12)
    os.kill(pid_of_controller("far"), signal.SIGKILL)
    wait_for(run, lambda s: s["step"] >= 24)
    edp.attach("far", path, options).stop("enough")
    result = run.result()
    result.export(tmp_path / "weights.safetensors")
    stored = edp.attach("far", path, options).result()
    assert stored.weights_sha256 == result.weights_sha256


@pytest.mark.slow
def test_an_installed_package_that_only_the_driver_has(tmp_path, monkeypatch):
    packages = tmp_path / "site-packages"
    packages.mkdir()
    (packages / "only_the_driver_has.py").write_text("def train(ctx): ...")
    monkeypatch.syspath_prepend(packages)
    only_the_driver_has = importlib.import_module("only_the_driver_has")
    with pytest.raises(
        ClusterError, match=r"(?s)runtime_env.*No module named 'only_the_driver_has'"
    ):
        trainer(tmp_path, "module", lambda ctx: only_the_driver_has.train(ctx)).start()


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
