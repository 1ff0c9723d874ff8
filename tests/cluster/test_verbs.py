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
    *("stop", "restart"),
}


def test_every_verb_prints_json_where_it_is_asked_to():
    verbs = typer.main.get_command(app).commands
    assert set(verbs) >= VERBS
    for name in VERBS:
        assert any("--json" in parameter.opts for parameter in verbs[name].params), name


@pytest.mark.parametrize("address", [[], ["--address", "head:6379"]])
def test_how_a_run_ended_is_said_where_its_cluster_is_gone(address, tmp_path, monkeypatch):
    pytest.importorskip("ray")
    from elastic_dp.cluster import finding, starting

    def gone(_):
        raise ClusterError("nobody answers")

    for module in (finding, starting):
        monkeypatch.setattr(module, "connect", gone)
    url = str(tmp_path / "job")
    write_result(url, Result("job", url, 7, "enough", "0", True), Limits())
    words = ["status", "job", "--json", "--storage-path", str(tmp_path), *address]
    said = json.loads(CliRunner().invoke(app, words, catch_exceptions=False).stdout)
    assert (said["phase"], said["step"]) == ("over", 7)
    assert CliRunner().invoke(app, ["status", "job", *address]).exit_code == 2
