"""The served API: what it answers, to whom, and what it refuses."""

import json
import os

import pytest

from elastic_dp.errors import ClusterError, SpecError
from elastic_dp.ui.server import web_server
from tests.report.journals import T0, event, night
from tests.report.test_report_reader import write
from tests.ui.serving import TOKEN, Recorded, served


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "ümlaut 100%"
    write(path, night())
    (path / "run.json").write_text("{}")
    (path.parent / "secret.json").write_text("{}")
    return path


@pytest.fixture(scope="module")
def shown(folder):
    with served(folder) as server:
        yield server


@pytest.fixture
def controls():
    return Recorded()


@pytest.fixture
def steered(folder, controls):
    with served(folder, token=TOKEN, find_live=controls.live) as server:
        yield server


def test_report_is_served_as_json(shown):
    report = shown.json("/api/report")
    assert (report["name"], report["lost"], report["step"]) == ("ümlaut 100%", 1, 6)
    assert report["until"] == pytest.approx(T0 + 12.1)


def test_run_with_half_a_character_in_a_name_is_served(tmp_path):
    write(tmp_path, [*night(), {"time": T0 + 1, "step": 1, os.fsdecode(b"caf\xe9"): 1.0}])
    with served(tmp_path) as server:
        assert "caf\udce9" in server.json("/api/report")["curves"]


def test_pages_hold_nothing_of_a_run_and_their_files_are_served(shown):
    status, headers, content = shown.ask("GET", "/")
    assert status == 200 and b"worker" not in content
    assert "script-src 'self'" in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    for file in ("plotly.js", "page.js", "live.js", "page.css"):
        assert f"/assets/{file}".encode() in content
        assert shown.ask("GET", f"/assets/{file}")[0] == 200


@pytest.mark.parametrize(
    "path",
    [
        *("/api/runs", "/api/report/", "/api/..", "/api/%2e%2e", "/api/../secret.json", "/api/%00"),
        *("/api/%ff%fe", "/assets/..%2f..%2freport_page.py", "/assets/../report_page.py"),
        *("/assets/page.html", "/assets/%2e%2e/__init__.py", "/nothing", "/api/steam", "//night"),
        *("/api/" + "a" * 5000, "/api/C:%5c"),
    ],
)
def test_path_that_leads_elsewhere_is_not_found(path, shown):
    status, _, content = shown.read(path)
    assert status in (404, 405, 307) and b"__init__" not in content and b"root:" not in content


def test_report_that_the_page_has_is_not_sent_again(tmp_path):
    write(tmp_path, night())
    with served(tmp_path) as server:
        status, headers, content = server.read("/api/report")
        assert status == 200 and json.loads(content)["lost"] == 1
        status, _, content = server.read("/api/report", If_None_Match=headers["etag"])
        assert (status, content) == (304, b"")
        assert server.read("/api/report", If_None_Match="0")[0] == 200


def test_holder_of_the_token_steers_a_run(steered, controls):
    assert steered.post("/api/scale", {"size": 3}) == (202, {"done": "3 workers asked for"})
    assert steered.post("/api/drain", {"worker": "w1"})[0] == 202
    assert steered.post("/api/checkpoint", {})[0] == 202
    assert steered.post("/api/stop", {})[0] == 202
    asked = [("scale", 3), ("drain", "w1"), ("checkpoint",), ("stop", "asked on the page")]
    assert controls.asked == asked


VERBS = ("scale", "drain", "checkpoint", "stop")


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": ""},
        {"Authorization": "Bearer "},
        {"Authorization": "Bearer wrong"},
        {"Authorization": TOKEN},
        {"Authorization": f"Basic {TOKEN}"},
        {"Authorization": f"Bearer {TOKEN}x"},
        {"Cookie": f"token={TOKEN}"},
    ],
)
def test_write_without_the_token_is_refused(headers, steered, controls):
    for verb in VERBS:
        status, answered, _ = steered.ask("POST", f"/api/{verb}", {}, **headers)
        assert (status, answered["www-authenticate"]) == (401, "Bearer")
    # The token in an address would be in logs.
    assert steered.ask("POST", f"/api/stop?token={TOKEN}", {})[0] == 401
    assert controls.asked == []


def test_write_from_another_site_is_refused_even_with_the_token(steered, controls):
    for headers in (
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": f"http://127.0.0.1:{steered.port + 1}"},
        {"Sec_Fetch_Site": "cross-site"},
    ):
        assert steered.post("/api/stop", {}, **headers)[0] == 403
    # What a form of another site can send.
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        assert steered.post("/api/stop", {}, Content_Type=kind)[0] == 415
    status, headers, _ = steered.ask("OPTIONS", "/api/stop", Origin="http://evil.example")
    assert status == 405 and not [name for name in headers if "access-control" in name.lower()]
    assert controls.asked == []
    same = f"http://127.0.0.1:{steered.port}"
    assert steered.post("/api/stop", {}, Origin=same)[0] == 202


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8642", "127.0.0.1.evil.example", "10.0.0.1", ""]
)
def test_name_of_another_site_is_refused(host, shown):
    """A page of that site, whose name leads here, would read what this server shows."""
    for path in ("/", "/api/report", "/assets/page.js"):
        assert shown.ask("GET", path, Host=host)[0] == 421


def test_server_that_only_shows_refuses_to_steer(shown):
    assert shown.post("/api/stop", {})[0] == 403


def test_nobody_reads_of_a_run_without_the_token(folder):
    """Also other users of this machine reach its loopback address."""
    with pytest.raises(SpecError, match="too short"):
        web_server(None, "short")
    with served(folder) as server:
        assert server.ask("GET", "/api/report")[0] == 401
        assert server.read("/api/report", Authorization="Bearer wrong")[0] == 401
        assert server.ask("GET", "/")[0] == 200  # which holds nothing of it
        assert server.post("/api/stop", {})[0] == 403  # without --control


@pytest.mark.parametrize(
    ("verb", "body", "status"),
    [
        *(("scale", body, 422) for body in ({}, {"size": 1.5}, {"size": "3"}, {"siz": 3}, [])),
        *(("scale", body, 422) for body in (b"null", {"size": 3, "x": 1})),
        *(("drain", body, 422) for body in ({}, {"worker": 3})),
        *(("stop", {"reason": "x"}, 422), ("checkpoint", [], 422)),
        *(("stop", body, 400) for body in (b"", b"{", b"\xff", b"[" * 10_000)),
        ("stop", b" " * 20_000, 413),
        *(("explode", {}, 404), ("../stop", {}, 404)),
    ],
)
def test_wrong_request_is_refused_by_name(verb, body, status, steered, controls):
    got, said = steered.post(f"/api/{verb}", body, **{"Content-Type": "application/json"})
    assert got == status and said["error"]
    assert controls.asked == []


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("error", "status", "told"),
    [
        (ClusterError("it is over, see s3://key:pass@host/x"), 409, "it is over, see s3://host/x"),
        (SpecError("size is 9, must be within 1..4"), 422, "size is 9, must be within 1..4"),
        (RuntimeError("password"), 503, "the run's controller does not answer: RuntimeError"),
    ],
)
def test_error_of_a_run_is_told_without_credentials(error, status, told, steered, controls):
    controls.error = error
    assert steered.post("/api/stop", {}) == (status, {"error": told})


@pytest.mark.filterwarnings("ignore")
def test_error_of_ray_is_printed_without_credentials(steered, controls, capfd):
    controls.error = RuntimeError("no answer from s3://key:passed@host/x")
    assert steered.post("/api/stop", {})[0] == 503
    printed = capfd.readouterr().err
    assert "RuntimeError: no answer from s3://host/x" in printed and "passed" not in printed


def test_store_that_does_not_answer_is_told_without_its_secrets(tmp_path):
    secret = "SECRETSECRET"
    options = {"access_key_id": "AKIA", "secret_access_key": secret}
    options["endpoint"] = "http://127.0.0.1:1"
    with served("s3://bucket/runs/night", options=options) as server:
        status, _, content = server.read("/api/report")
    assert status == 503 and json.loads(content)["error"]
    assert secret.encode() not in content


def test_damaged_folder_is_served_without_a_fault(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.json").write_text("x")
    (run / "result.json").write_text("[")
    (run / "events.jsonl").write_bytes(b"\xff\x00{}\n" + json.dumps(event(0, "FailRun")).encode())
    (run / "metrics.jsonl").mkdir()
    with served(run) as server:
        status, _, content = server.read("/api/report")
        assert status in (200, 503), content
