"""Two Rays of one user on one machine, each with a run of the same name: a verb finds the one that
is meant, and refuses to guess."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import ray
from typer.testing import CliRunner

from elastic_dp import cli
from elastic_dp.cluster.ray import cluster_connection
from tests.patience import PATIENCE_S, eventually
from tests.ray import clusters

pytestmark = pytest.mark.ray

RUNS = """
import sys
import ray
import elastic_dp as edp
from tests.runs import Points
from tests.train.jobs import adamw, classifier, loop

ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
run = edp.ElasticTrainer(
    lambda ctx: loop(ctx, model := classifier(), adamw(model)),
    name="job",
    storage_path=sys.argv[1],
    data=edp.MapStyleData(Points(), micro_batch_size=4),
    scaling=edp.ScalingConfig(max_workers=2, virtual_workers=2),
    max_steps=10**9,
).start()
print(ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Two storage paths, and the addresses of the Rays that train there."""
    paths = [tmp_path_factory.mktemp(name) for name in ("older", "newer")]
    env = os.environ | {"PYTHONPATH": clusters.MINIMAL_PATH}
    env.pop("RAY_ADDRESS", None)
    with contextlib.ExitStack() as stack:
        addresses = []
        for path in paths:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            words = [sys.executable, "-c", RUNS, str(path)]
            process = stack.enter_context(
                subprocess.Popen(words, cwd=clusters.ROOT, env=env, **pipes)
            )
            stack.callback(process.communicate)  # closes its input, by which it ends
            addresses.append(process.stdout.readline().strip())
        yield paths, addresses


@pytest.fixture(autouse=True)
def _only_ours(two, monkeypatch):
    """Other Rays of the machine are left alone; this process is connected to none."""
    newest_first = two[1][::-1]
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(cluster_connection, "clusters_of_this_user", lambda: newest_first)
    yield
    ray.shutdown()


def asked(*words, code=0):
    said = CliRunner().invoke(cli.app, [str(word) for word in words])
    ray.shutdown()  # as the end of the command's process does
    assert said.exit_code == code, (said.output, said.exception)
    return json.loads(said.stdout) if "--json" in words else said.output


def test_verb_finds_the_run_of_a_folder_on_the_older_ray_and_kills_its_worker(two):
    (older, newer), (address, other) = two
    there = "--storage-path", older
    status = eventually(
        lambda: (said := asked("status", "job", "--json", *there))["step"] > 0 and said
    )
    process = status["processes"]["w1"]
    assert process["node"] == address.rpartition(":")[0]
    assert b"WorkerActor" in Path(f"/proc/{process['pid']}/cmdline").read_bytes()
    table = asked("status", "job", *there)
    assert f"{process['pid']}" in table and process["node"] in table
    # Even with the address of the other: that one has no run of this folder.
    assert asked("status", "job", "--json", *there, "--address", other)["phase"] == "running"

    def processes():
        return asked("status", "job", "--json", *there)["processes"]

    eventually(lambda: processes().keys() == {"w1", "w2"})
    assert "must be one of w1, w2" in asked("scale", "job", "--kill", "w9", *there, code=2)
    assert asked("scale", "job", "--kill", "w2", "--json", *there) == {
        "name": "job",
        "worker": "w2",
    }
    eventually(lambda: processes().keys() == {"w1", "w3"})
    assert "w1" in asked("status", "job", "--json", "--storage-path", newer)["workers"]


def test_verb_that_knows_only_a_name_that_both_rays_have_refuses_to_choose(two):
    paths, addresses = two
    assert set(addresses) <= cluster_connection.clusters_here().keys()
    for words in (["stop", "job"], ["status"], ["status", "job"], ["status", "jib"]):
        said = asked(*words, code=2)
        assert all(address in said for address in addresses)
    assert all(f"{path}/job" in asked("scale", "job", "2", code=2) for path in paths)
    rows = asked("status", "--json", "--address", addresses[0])
    assert [row["name"] for row in rows] == ["job"]
    said = asked("status", "jib", "--address", addresses[0], code=2)
    assert f"no run named 'jib' is live on {addresses[0]}, which has: job" in said


def test_run_that_has_ended_is_told_by_its_folder_whatever_the_other_ray_has(two):
    (older, _), (_, newer) = two
    ended = asked("stop", "job", "--wait", "--json", "--storage-path", older)
    assert ended["path"] == str(older / "job")
    assert asked("status", "job", "--json", "--storage-path", older)["phase"] == "over"
    assert "is not live" in asked("stop", "job", "--storage-path", older, code=2)
    assert asked("status", "job", "--json", "--address", newer)["phase"] == "running"
    # Only the other one is live by that name.
    assert asked("status", "job", "--json")["phase"] == "running"
    assert asked("status", older / "job", "--json")["phase"] == "over"


JOB = """
import elastic_dp as edp
from tests.runs import Points
from tests.train.jobs import adamw, classifier, cross_entropy


def train(ctx):
    model = classifier()
    for step in ctx.steps(model, adamw(model), cross_entropy):
        ctx.stop("enough")


edp.ElasticTrainer(
    train,
    name="job",
    storage_path="FOLDER",
    data=edp.MapStyleData(Points(), micro_batch_size=4),
    scaling=edp.ScalingConfig(max_workers=1, virtual_workers=2),
    max_steps=10**9,
).fit()
"""


@pytest.mark.slow
def test_restart_of_a_run_whose_ray_ends_with_another_process_goes_on_here(two, tmp_path):
    """The folder names the older process's Ray; without it the lease would be waited for."""
    _, newer = two[0]
    env = os.environ | {"PYTHONPATH": clusters.MINIMAL_PATH}
    script = tmp_path / "job.py"
    script.write_text(JOB.replace("FOLDER", str(newer)))
    before = asked("status", "job", "--json", "--storage-path", newer)["step"]
    words = [sys.executable, "-m", "elastic_dp.cli", "run", str(script), "--restart", "--json"]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    (ended,) = json.loads(done.stdout)["runs"]
    assert ended["reason"] == "enough" and ended["step"] > before
    stopped = [
        line["reason"]
        for line in map(json.loads, (newer / "job" / "events.jsonl").read_text().splitlines())
        if line.get("event") == "StopRequested"
    ]
    assert stopped == ["to be started again"]
