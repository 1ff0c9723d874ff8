"""The command line against a real run: the script of a user, asked and steered from outside, and
run again."""

import json
import re
import subprocess
import sys
from functools import partial
from itertools import pairwise

import pytest
from typer.testing import CliRunner

import elastic_dp as edp
from elastic_dp import cli
from elastic_dp.cluster.runs.attach import find_live
from elastic_dp.urls import StorageURL
from tests.patience import PATIENCE_S, eventually
from tests.ray import clusters
from tests.runs import Points
from tests.train.jobs import adamw, classifier, loop
from tests.ui.serving import TOKEN, served

pytestmark = pytest.mark.ray

JOB = """
import sys
import time

import elastic_dp as edp
from tests.runs import Points
from tests.train.jobs import adamw, classifier, cross_entropy


def train(ctx):
    model = classifier()
    print("hello from", ctx.config["word"])
    for step in ctx.steps(model, adamw(model), cross_entropy):
        ctx.log({"loss": step.loss})
        time.sleep(ctx.config["body_s"])


if __name__ == "__main__":
    print("the script has", sys.argv[1:])
    trainer = edp.ElasticTrainer(
        train,
        name="job",
        storage_path="RUNS",
        config={"word": "nobody", "body_s": 0.0},
        data=edp.MapStyleData(Points(), micro_batch_size=4),
        scaling=edp.ScalingConfig(min_workers=1, max_workers=1, virtual_workers=4),
        max_steps=10,
    )
    trainer.start() if "start" in sys.argv else trainer.fit()
"""


@pytest.fixture(scope="module", autouse=True)
def cluster():
    with clusters.shared() as cluster:
        yield cluster


@pytest.fixture
def job(tmp_path):
    path = tmp_path / "job.py"
    path.write_text(JOB.replace("RUNS", str(tmp_path / "runs")))
    return path


def asked(*arguments, code=0):
    result = CliRunner().invoke(cli.app, [str(a) for a in arguments])
    assert result.exit_code == code, (result.output, result.exception)
    return result


def said(verb, *arguments, code=0):
    """The JSON that a verb prints, and nothing else."""
    return json.loads(asked(verb, "--json", *arguments, code=code).stdout)


def live():
    found = {row["name"]: row for row in said("status")}
    trains = "job" in found and found["job"]["step"] > 0 and found["job"]["phase"] == "running"
    return trains and found["job"]


@pytest.mark.filterwarnings("ignore:since the last start of this run")
def test_a_run_from_its_start_to_its_restart(job, tmp_path):
    assert "no run named 'job' is live on this cluster" in asked("status", "job", code=2).stderr
    long = ("--set", "config.body_s=0.2", "--set", "max_steps=100000")
    asked("run", job, *long, "--set", "config.word=cli", "--", "start")
    row = eventually(live)
    assert row["size"] == 1
    assert "job" in asked("status").stdout

    assert said("scale", "job", "2") == {"name": "job", "size": 2}
    assert "within 1..4" in asked("scale", "job", "9", code=2).stderr
    eventually(lambda: said("status", "job")["world_size"] == 2)
    assert re.search("^w1 +member +[0-9]+ +[0-9.]+$", asked("status", "job").stdout, re.M)
    assert "must be one of w1, w2" in asked("scale", "job", "--kill", "w9", code=2).stderr
    assert said("scale", "job", "--kill", "w2") == {"name": "job", "worker": "w2"}
    eventually(
        lambda: (now := said("status", "job"))["world_size"] == 2 and "w3" in now["processes"]
    )
    assert "must be one of w1, w3" in asked("scale", "job", "--drain", "nobody", code=2).stderr
    assert said("scale", "job", "--drain", "w3")["worker"] == "w3"
    assert "1 worker asked for" in asked("scale", "job", "1").stdout
    eventually(lambda: list(said("status", "job")["workers"]) == ["w1"])

    steering = partial(find_live, "job", StorageURL(str(tmp_path / "runs/job")))
    with served(tmp_path / "runs/job", token=TOKEN, find_live=steering) as page:
        assert page.post("/api/scale", {"size": 1}) == (
            202,
            {"done": "1 worker asked for"},
        )
        status, said_of = page.post("/api/scale", {"size": 9})
        assert status == 422 and "within 1..4" in said_of["error"]
        assert page.post("/api/drain", {"worker": "nobody"})[0] == 422
        assert page.json("/api/report")["phase"] == "running"

    asked("checkpoints", "save", "job")  # no other is asked for until the restart
    lines = eventually(
        lambda: (
            "is committed" in (out := asked("logs", "job", "--events", "--json").stdout)
            and out.splitlines()
        )
    )
    assert {"StartWorker", "SizeRequested"} <= {
        line.get("command") or line.get("event") for line in map(json.loads, lines)
    }
    assert "starting 1 worker\n" in asked("logs", "job", "--events").stdout
    # Its log comes some seconds later, and until then the folder has none of it.
    of_w1 = ["logs", "job", "--worker", "w1"]
    eventually(lambda: "w1  hello from cli" in CliRunner().invoke(cli.app, of_w1).stdout)
    nobody = asked("logs", "job", "--worker", "w9", code=2).stderr
    assert f"must be one of those in {tmp_path}/runs/job/logs: w1" in nobody
    there = ("--storage-path", tmp_path / "runs")
    assert "starting 1 worker" in asked("logs", "job", "--events", *there).stdout  # of the live one
    assert said("status", "job", *there)["phase"] == "running"

    with pytest.warns(UserWarning, match=r"scaling.max_workers=1, not 3.*elastic-dp scale"):
        asked("run", job, *long, "--set", "scaling.max_workers=3", "--", "start")
    more = said("status", "job")["step"] + 300  # a lower limit than before, which warns
    other = tmp_path / "new_job.py"  # by its own name it would be another run
    other.write_text(job.read_text().replace('name="job"', 'name="other"').replace("/runs", "/off"))
    broken = tmp_path / "broken.py"
    same = ("--set", "name=job", "--set", f"storage_path={tmp_path / 'runs'}")
    broken.write_text(other.read_text().replace("trainer =", "no_such_name\n    trainer ="))
    assert said("run", broken, "--restart", *same, code=1)["error"].startswith("NameError")
    assert said("status", "job")["phase"] == "running"  # the script is checked first
    again = said("run", other, "--restart", "--set", f"max_steps={more}", *same)
    assert again["exit_code"] == 0
    metrics = (tmp_path / "runs" / "job" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in metrics]
    went_back = next((last - now for last, now in pairwise(steps) if now <= last), 0)
    assert went_back < 10  # it went on from where it was stopped
    (ended,) = again["runs"]
    assert (ended["url"], ended["step"]) == (str(tmp_path / "runs" / "job"), more)
    result = json.loads((tmp_path / "runs" / "job" / "result.json").read_text())
    assert result["weights_sha256"] == undisturbed(tmp_path, more)
    assert (said("status", "job", *there)["phase"], said("status")) == ("over", [])
    assert "starting 1 worker" in asked("logs", "job", "--events", *there).stdout
    assert "w1  hello from nobody" in asked("logs", "job", "--worker", "w1", *there).stdout
    assert [(row["name"], row["phase"]) for row in said("status", *there)] == [("job", "over")]
    with served(tmp_path / "runs/job", token=TOKEN, find_live=steering) as page:
        assert page.post("/api/stop", {})[0] == 409
    gone = edp.attach("job", tmp_path / "runs")
    assert gone.result().step == more
    assert any(line.get("step") == more for line in gone.events(follow=False))
    assert ("w1", "hello from nobody") in list(gone.logs("w1", tail=10**6))

    other.write_text(job.read_text().replace("step.loss", "step.los"))
    failed = json.loads(
        asked("run", "--json", other, "--set", f"max_steps={more + 9}", code=1).stdout
    )
    assert failed["error"].startswith("UserCodeError: ")
    assert failed["error"].count('ctx.log({"loss": step.los})') == 1  # the line of the script
    assert failed["runs"] == [{"url": again["runs"][0]["url"]}]  # not the result of before


def undisturbed(path, steps):
    return (
        edp.ElasticTrainer(
            lambda ctx: loop(ctx, model := classifier(), adamw(model)),
            name="calm",
            storage_path=str(path),
            data=edp.MapStyleData(Points(), micro_batch_size=4),
            scaling=edp.ScalingConfig(virtual_workers=4),
            max_steps=steps,
        )
        .fit(local=True)
        .weights_sha256
    )


def test_run_ends_with_the_code_of_its_script(tmp_path):
    def code_of(text, *more):
        (tmp_path / "script.py").write_text(text)
        result = CliRunner().invoke(cli.app, ["run", str(tmp_path / "script.py"), *more])
        return result.exit_code, result.stderr.strip().splitlines()[-1:]

    assert code_of("import sys; sys.exit(3)") == (3, [])
    assert code_of("raise SystemExit('no')") == (1, ["no"])
    assert code_of("raise SystemExit(2.5)") == (1, [])  # as Python has it
    assert code_of("{}['x']") == (1, ["KeyError: 'x'"])
    ours = "import elastic_dp.errors as e; raise e.{}"
    assert code_of(ours.format("SpecError('size')")) == (2, ["SpecError: size"])
    assert code_of(ours.format("ClusterError('full')")) == (1, ["ClusterError: full"])
    code, told = code_of("", "--set", "max_steps=3")
    assert code == 2 and "makes no ElasticTrainer" in told[0]


@pytest.mark.slow
def test_doctor_asks_each_node_of_a_cluster(cluster, tmp_path):
    second = cluster.add_node(num_cpus=0)
    where = ("--address", cluster.address, "--storage-path", tmp_path)
    try:
        checks = said("doctor", *where)["checks"]
        apart = said("doctor", "--address", cluster.address, "--storage-path", "memory://", code=1)
    finally:
        cluster.remove_node(second)
    nodes = {check["where"] for check in checks} - {""}
    assert len(nodes) == 2
    for name in ("versions", "clock"):
        assert {c["where"] for c in checks if c["check"] == name} >= nodes, name
    texts = {check["check"]: (check["level"], check["text"]) for check in checks}
    assert [check["level"] for check in checks if check["check"] == "network"] == ["ok", "ok"]
    assert [check["level"] for check in checks if check["check"] == "shared storage"] == ["ok"] * 2
    assert texts["same versions"] == ("ok", "all 2 nodes have the same versions")
    assert not list(tmp_path.iterdir())
    alone = [check for check in apart["checks"] if check["check"] == "shared storage"]
    assert [check["level"] for check in alone] == ["fails", "fails"]  # each process has its own


def test_an_address_that_is_none_is_said():
    script = """
import sys
from elastic_dp.cli import app
for address in sys.argv[1:]:
    try:
        app(["status", "--address", address])
    except SystemExit as ended:
        assert ended.code == 2, ended.code
"""
    addresses = ("http://127.0.0.1:8265", "garbage")
    words = [sys.executable, "-c", script, *addresses]
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    for address in addresses:
        assert f"cannot connect to a Ray cluster at {address}: give --address" in done.stderr
