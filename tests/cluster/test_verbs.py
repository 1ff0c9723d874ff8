"""What all verbs of the command line for runs have in common."""

import json

import pytest
import typer
from typer.testing import CliRunner

from elastic_dp.cli import app
from elastic_dp.cluster.record import Limits, Result, write_result
from elastic_dp.errors import ClusterError

VERBS = {
    *("run", "submit", "list", "status", "events", "logs", "scale", "drain", "checkpoint"),
    *("stop", "restart", "data convert", "data inspect", "checkpoints list", "checkpoints verify"),
    "checkpoints export",
}


def test_every_verb_prints_json_where_it_is_asked_to():
    verbs = {}
    for name, command in typer.main.get_command(app).commands.items():
        inner = getattr(command, "commands", None)
        verbs |= {name: command} if inner is None else {f"{name} {v}": c for v, c in inner.items()}
    assert set(verbs) == VERBS
    for name in VERBS:
        assert any("--json" in parameter.opts for parameter in verbs[name].params), name


@pytest.mark.parametrize("address", [[], ["--address", "head:6379"]])
def test_how_a_run_ended_is_said_where_its_cluster_is_gone(address, tmp_path, monkeypatch):
    pytest.importorskip("ray")
    from elastic_dp.cluster import finding

    def gone(*_, **__):
        raise ClusterError("nobody answers")

    monkeypatch.setattr(finding, "connect", gone)
    url = str(tmp_path / "job")
    write_result(url, Result("job", url, 7, "enough", "0", True), Limits())
    words = ["status", "job", "--json", "--storage-path", str(tmp_path), *address]
    said = json.loads(CliRunner().invoke(app, words, catch_exceptions=False).stdout)
    assert (said["phase"], said["step"]) == ("over", 7)
    assert CliRunner().invoke(app, ["status", "job", *address]).exit_code == 2


@pytest.mark.parametrize(
    ("live", "newest", "taken", "others"),
    [
        (["a:1"], None, "a:1", []),
        (["a:1"], "gone:1", "a:1", []),  # the file of a cluster that was killed
        (["a:1", "b:2"], "b:2", "b:2", ["a:1"]),
        (["b:2", "a:1", "c:3"], "gone:1", "a:1", ["b:2", "c:3"]),
        ([], "away:1", "auto", []),  # as Ray finds it
    ],
)
def test_of_several_local_clusters_the_one_that_was_taken_is_said(
    live, newest, taken, others, monkeypatch
):
    pytest.importorskip("ray")
    from elastic_dp.cluster import finding

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    connected, told = [], []
    monkeypatch.setattr(finding.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(finding.ray, "init", lambda address, **_: connected.append(address))
    monkeypatch.setattr(finding, "find_gcs_addresses", lambda: frozenset(live))
    monkeypatch.setattr(finding, "find_bootstrap_address", lambda _: newest)
    finding.connect(None, told.append)
    assert connected == [taken]
    assert bool(told) is bool(others)
    for text in told:
        assert f"this is the one at {taken}" in text
        assert f"choose another by --address or RAY_ADDRESS: {', '.join(others)}" in text
    told.clear()
    finding.connect("b:2", told.append)
    assert connected == [taken, "b:2"] and not told
    monkeypatch.setenv("RAY_ADDRESS", "d:4")
    finding.connect(None, told.append)  # Ray goes by it
    assert connected[-1] == "auto" and not told


def test_help_of_a_verb_says_where_it_goes_without_an_address():
    """Which differs: `run` starts a Ray, `submit` talks to a dashboard, the others look for a cluster."""
    verbs = typer.main.get_command(app).commands

    def told(name):
        return next(p.help for p in verbs[name].params if "--address" in p.opts)

    assert "a Ray of the run's own" in told("run") and "http://HOST:8265" in told("submit")
    for name in ("list", "status", "events", "logs", "scale", "drain", "stop", "restart"):
        assert "HOST:6379. Default: the one on this machine, of several the newest" in told(name)
