"""`elastic-dp report --live` as a process: its address, and what it refuses to start with."""

import json
import os
import signal
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from elastic_dp.cli import app
from elastic_dp.ui.server import listening_socket
from tests.report.journals import night
from tests.report.test_report_reader import write
from tests.ui.serving import Served


@pytest.fixture
def stored(tmp_path):
    write(tmp_path / "night", night())
    (tmp_path / "night" / "run.json").write_text("{}")
    return ["--storage-path", str(tmp_path)]


def test_ui_prints_its_address_serves_and_ends_by_a_signal(stored):
    words = [sys.executable, "-m", "elastic_dp.cli", "report", "night", "--live"]
    words += [*stored, "--port", "0", "--json"]
    env = {name: v for name, v in os.environ.items() if name != "ELASTIC_DP_UI_TOKEN"}
    with subprocess.Popen([*words, "--control"], stdout=subprocess.PIPE, env=env) as process:
        try:
            url, _, token = json.loads(process.stdout.readline())["url"].partition("#token=")
            assert len(token) >= 32
            server = Served(int(url.rstrip("/").rpartition(":")[2]), token)
            assert server.json("/api/report")["lost"] == 1
            assert server.ask("POST", "/api/stop", {})[0] == 401
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["night", "--live", "--host", "0.0.0.0"], "--host does not exist any more; the page is"),
        (["night", "--live", "--token", "short"], "the token is too short"),
        (["night", "--control"], "--control is of a served page: add --live"),
        (["night", "--port", "80"], "--port is of a served page: add --live"),
        (["night", "--live", "-o", "x.html"], "--output names a file for the page"),
        (["nobody", "--live"], "no run named 'nobody'"),
    ],
)
def test_live_report_refuses_by_name(words, message, stored):
    said = CliRunner().invoke(app, ["report", *words, *stored])
    assert said.exit_code == 2 and message in said.stderr


def test_port_that_is_taken_is_refused_by_name(stored):
    with listening_socket(0) as taken:
        port = str(taken.getsockname()[1])
        said = CliRunner().invoke(app, ["report", "night", "--live", "--port", port, *stored])
    assert said.exit_code == 2 and f"--port is {port}: " in said.stderr
