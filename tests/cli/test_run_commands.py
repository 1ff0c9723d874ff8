"""What all verbs of the command line for runs have in common."""

import json
import os
import socket
import types

import pytest
import typer
from typer.testing import CliRunner

from elastic_dp.cli import app
from elastic_dp.errors import ClusterError
from elastic_dp.run_record import Result, RunLimits, write_result

VERBS = {
    *("run", "status", "logs", "scale", "stop", "rewind", "report", "doctor"),
    *("data convert", "data inspect"),
    *("checkpoints list", "checkpoints save", "checkpoints export"),
}


def test_every_verb_prints_json_where_it_is_asked_to():
    verbs = {}
    for name, command in typer.main.get_command(app).commands.items():
        inner = getattr(command, "commands", None)
        verbs |= {name: command} if inner is None else {f"{name} {v}": c for v, c in inner.items()}
    assert set(verbs) == VERBS
    for name in VERBS:
        assert any("--json" in parameter.opts for parameter in verbs[name].params), name


@pytest.mark.parametrize("words", [["logs", "mine", "--events"], ["status", "mine"]])
def test_loss_that_is_not_finite_is_printed_as_json(words, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "run.json").write_text("{}")
    (tmp_path / "mine" / "metrics.jsonl").write_text('{"time": 1.0, "step": 1, "loss": "NaN"}\n')
    said = CliRunner().invoke(app, [*words, "--json", "--storage-path", str(tmp_path)])
    facts = json.loads(said.stdout, parse_constant=pytest.fail)
    assert facts.get("metrics", facts)["loss"] is None


def test_run_may_have_the_name_of_a_verb_that_is_gone(tmp_path):
    said = CliRunner().invoke(
        app, ["checkpoints", "list", "verify", "--storage-path", str(tmp_path)]
    )
    assert "no run named 'verify'" in said.stderr
    assert "list RUN --verify" in CliRunner().invoke(app, ["checkpoints", "verify", "x"]).stderr


STEERING = {
    "scale": ["mine", "2"],
    "checkpoints": ["save", "mine"],
    "stop": ["mine"],
}


@pytest.mark.parametrize("verb", STEERING)
def test_verb_that_steers_a_run_which_has_ended_says_how_it_ended(verb, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "run.json").write_text("{}")
    write_result(str(tmp_path / "mine"), Result("mine", "", 7, "enough", "0", True), RunLimits())
    words = [verb, *STEERING[verb], "--storage-path", str(tmp_path)]
    said = CliRunner().invoke(app, words)
    assert said.exit_code == 2, said.output
    assert "mine is not live: finished after step 7: enough" in said.stderr
    assert "to continue from step 7; if that is its last step, raise its limit" in said.stderr


@pytest.mark.parametrize(
    ("verb", "now"),
    [("list", "status"), ("top", "report RUN --live"), ("drain", "scale RUN --drain WORKER")],
)
def test_verb_of_an_earlier_version_is_refused_with_the_one_of_today(verb, now):
    said = CliRunner().invoke(app, [verb, "mine"])
    assert said.exit_code == 2
    assert f"{verb} does not exist any more, use: elastic-dp {now}" in " ".join(said.stderr.split())
    said = CliRunner().invoke(app, [verb, "--json"])
    assert now in json.loads(said.stdout)["error"]


def test_status_of_a_misspelt_run_suggests_the_one_that_is_meant(tmp_path):
    url = str(tmp_path / "resnet-a")
    (tmp_path / "resnet-a").mkdir()
    (tmp_path / "resnet-a" / "run.json").write_text("{}")
    write_result(url, Result("resnet-a", url, 7, "enough", "0", True), RunLimits())
    for word, suggested in (("resnet-b", True), ("gpt", False)):
        said = CliRunner().invoke(app, ["status", word, "--storage-path", str(tmp_path)])
        assert said.exit_code == 2
        assert ("Did you mean 'resnet-a'?" in said.stderr) == suggested


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["report", "--output", "x.html"], "SpecError: --output names a file for the page"),
        (["scale", "3", "--drain", "w1"], "give one of: a SIZE, --drain WORKER, --kill WORKER"),
        (["scale"], "give one of: a SIZE, --drain WORKER, --kill WORKER"),
        (["scale", "--within-s", "3"], "--within-s does not exist any more"),
        (["stop", "--reason", "x"], "--reason does not exist any more"),
        (["status", "--watch"], "--watch does not exist any more; use: watch -n 1 elastic-dp"),
        (["rewind", "--to-step", "7", "--leave-out", "9-12"], "must be two steps, as in"),
        (["logs", "--events", "--tail", "3"], "--tail is of what workers have printed"),
        (["logs", "--events", "--worker", "w1"], "--worker is of what workers have printed"),
        (["status", "--storage-option", "=x"], "--storage-option … must be of the form NAME=VALUE"),
    ],
)
def test_option_that_would_change_nothing_is_refused(words, error, tmp_path):
    words = [words[0], "mine", *words[1:], "--storage-path", str(tmp_path), "--json"]
    said = CliRunner().invoke(app, words)
    assert said.exit_code == 2 and error in json.loads(said.stdout)["error"]


@pytest.mark.parametrize("address", [[], ["--address", "head:6379"]])
def test_how_a_run_ended_is_said_where_its_cluster_is_gone(address, tmp_path, monkeypatch):
    from elastic_dp.cluster.ray import cluster_connection

    def gone(*_, **__):
        raise ClusterError("nobody answers")

    monkeypatch.setattr(cluster_connection, "connect", gone)
    url = str(tmp_path / "job")
    write_result(url, Result("job", url, 7, "enough", "0", True), RunLimits())
    words = ["status", "job", "--json", "--storage-path", str(tmp_path), *address]
    said = json.loads(CliRunner().invoke(app, words, catch_exceptions=False).stdout)
    assert (said["phase"], said["step"]) == ("over", 7)
    assert CliRunner().invoke(app, ["status", "job", *address]).exit_code == 2


def raylet(address, started, uid=None):
    words = ["/ray/core/src/ray/raylet/raylet", "--node-name=x", f"--gcs-address={address}"]
    uids = types.SimpleNamespace(real=os.getuid() if uid is None else uid)
    return {"cmdline": words, "create_time": started, "uids": uids}


OTHERS = -1  # a user
GCS = {"cmdline": ["gcs_server", "--gcs-address=no"], "create_time": 9.0, "uids": None}


@pytest.mark.parametrize(
    ("processes", "expected"),
    [
        ([], "cannot connect to a Ray cluster at this machine"),
        ([GCS, raylet("a:1", 1.0)], "a:1"),
        (
            [raylet("b:2", 2.0), raylet("a:1", 1.0)],
            "choose one by --address or RAY_ADDRESS: b:2, a:1",
        ),
        ([raylet("a:1", 1.0), raylet("a:1", 3.0)], "a:1"),  # two nodes
        ([raylet("a:1", 1.0), raylet("b:2", 2.0, OTHERS)], "a:1"),
        ([raylet("b:2", 2.0, OTHERS)], "cannot connect to a Ray cluster at this machine"),
    ],
)
def test_connect_without_an_address_takes_the_one_cluster_of_this_user(
    processes, expected, monkeypatch
):
    from elastic_dp.cluster.ray import cluster_connection

    running = [types.SimpleNamespace(info=info) for info in processes]
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    connected = []
    monkeypatch.setattr(cluster_connection.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(
        cluster_connection.ray, "init", lambda address, **_: connected.append(address)
    )
    processes = types.SimpleNamespace(process_iter=lambda _: running)
    monkeypatch.setattr(cluster_connection.private, "psutil", lambda: processes)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setattr(cluster_connection, "_wait_for_a_listener", lambda *_: None)
    if ":" in expected[:3]:
        cluster_connection.connect(None)
        assert connected == [expected]
    else:
        with pytest.raises(ClusterError, match=expected):
            cluster_connection.connect(None)
        assert connected == []
    connected.clear()
    cluster_connection.connect("d:4")
    monkeypatch.setenv("RAY_ADDRESS", "e:5")
    cluster_connection.connect(None)
    assert connected == ["d:4", "e:5"]


def test_address_where_nobody_listens_is_refused_without_asking_ray(monkeypatch):
    from elastic_dp.cluster.ray import cluster_connection

    monkeypatch.setattr(cluster_connection, "_LISTENER_S", 0.0)
    monkeypatch.setattr(cluster_connection.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(cluster_connection.ray, "init", lambda **_: pytest.fail("Ray was asked"))
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # and does not listen
        address = f"127.0.0.1:{bound.getsockname()[1]}"
        with pytest.raises(ClusterError, match=f"cannot connect to a Ray cluster at {address}"):
            cluster_connection.connect(address)


@pytest.mark.parametrize("address", ["127.0.0.1:{}", "ray://head:10001", "auto"])
def test_address_where_somebody_listens_or_that_ray_alone_knows_is_left_to_ray(
    address, monkeypatch
):
    from elastic_dp.cluster.ray import cluster_connection

    asked = []
    monkeypatch.setattr(cluster_connection, "_LISTENER_S", 5.0)
    monkeypatch.setattr(cluster_connection.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(cluster_connection.ray, "init", lambda address, **_: asked.append(address))
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = address.format(server.getsockname()[1])
        cluster_connection.connect(address)
    assert asked == [address]


@pytest.mark.parametrize(
    ("saved", "mode", "wanted"),
    [(True, None, "token"), (False, None, None), (True, "disabled", "disabled")],
)
def test_token_that_ray_saved_is_sent_unless_the_user_says_otherwise(
    saved, mode, wanted, tmp_path, monkeypatch
):
    from elastic_dp.cluster.ray import cluster_connection

    monkeypatch.setattr(cluster_connection.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(cluster_connection.ray, "init", lambda **_: None)
    monkeypatch.setattr(cluster_connection, "_wait_for_a_listener", lambda *_: None)
    read_again = []
    monkeypatch.setattr(
        cluster_connection.private, "reload_authentication", lambda: read_again.append(True)
    )
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_AUTH_MODE", mode or "")
    if mode is None:
        monkeypatch.delenv("RAY_AUTH_MODE")
    if saved:
        (tmp_path / ".ray").mkdir()
        (tmp_path / ".ray" / "auth_token").write_text("secret")
    cluster_connection.connect("a:1")
    assert os.environ.get("RAY_AUTH_MODE") == wanted
    assert bool(read_again) is (wanted == "token")
