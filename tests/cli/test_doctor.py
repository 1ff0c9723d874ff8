"""`elastic-dp doctor`: each check is seen to find what it is for."""

import dataclasses
import json
import re
import socket
import tomllib
import uuid
from pathlib import Path

import pytest
from typer.testing import CliRunner

from elastic_dp.cli import app
from elastic_dp.cluster.doctor import node_facts
from elastic_dp.cluster.doctor.check_result import CheckLevel
from elastic_dp.cluster.doctor.node_checks import (
    MINIMUM,
    PYTHON,
    check_clock,
    check_machine,
    check_together,
)
from elastic_dp.cluster.doctor.node_facts import GpuFacts, NodeFacts, facts_of_this_machine
from elastic_dp.cluster.doctor.store_check import check_store
from elastic_dp.cluster.ray import cluster_connection
from elastic_dp.errors import ClusterError
from elastic_dp.storage import Store
from elastic_dp.urls import StorageURL

VERSIONS = {"elastic_dp": "0.1.0", "torch": "2.13.0+cpu", "ray": "2.60.0", "pyarrow": "26.0.1"}
GOOD = NodeFacts(
    host="10.0.0.1",
    python="3.11.7",
    versions=VERSIONS,
    shm_bytes=8 << 30,
    open_files=65536,
    niceness=0,
    gpus=None,
    port_errors=(),
    health_check=(1.0, 3.0, 3),
    head=True,
)
H100 = GpuFacts(("H100", "H100"), "2.27.5")


def levels(results):
    return {result.check: result.level for result in results if result.level is not CheckLevel.OK}


@pytest.mark.parametrize(
    ("changes", "check", "level", "words"),
    [
        ({"python": "3.10.2"}, "versions", "fails", "Python 3.10.2 is not 3.11 to 3.13"),
        ({"python": "3.14.0"}, "versions", "fails", "Python 3.14.0 is not"),
        (
            {"versions": VERSIONS | {"torch": "2.9.1"}},
            "versions",
            "fails",
            "torch 2.9.1 is older than 2.11",
        ),
        ({"versions": {"torch": "2.13"}}, "versions", "fails", "ray is not installed; pyarrow"),
        ({"port_errors": ("UDP: no route",)}, "ports", "fails", "10.0.0.1 can be bound"),
        ({"shm_bytes": 64 << 20}, "shared memory", "warning", "/dev/shm has 64 MiB, less than 128"),
        ({"shm_bytes": None}, "shared memory", "warning", "there is no /dev/shm"),
        ({"shm_bytes": 512 << 20, "gpus": H100}, "shared memory", "warning", "1024 MiB, for NCCL"),
        ({"open_files": 1024}, "open files", "warning", "may open 1024 files"),
        ({"gpus_of_ray": 2.0}, "GPUs", "fails", "Ray counts 2, but the machine has no driver"),
        (
            {"gpus_of_ray": 2.0, "gpus": GpuFacts(error="built without CUDA")},
            "GPUs",
            "fails",
            "torch finds none: built without CUDA",
        ),
    ],
)
def test_machine_with_one_fault_has_this_one_result(changes, check, level, words):
    results = check_machine(dataclasses.replace(GOOD, **changes), "node 1")
    assert levels(results) == {check: CheckLevel(level)}
    (result,) = [result for result in results if result.check == check]
    assert words in result.text and result.way_out and result.where == "node 1"


def test_machine_without_a_fault_has_no_warning_and_names_its_gpus():
    results = check_machine(dataclasses.replace(GOOD, gpus=H100))
    assert not levels(results)
    assert "2 × H100; NCCL 2.27.5" in [result.text for result in results]
    assert not levels(check_together({"a": GOOD, "b": GOOD}))


@pytest.mark.parametrize(
    ("changes", "check", "words"),
    [
        ({"versions": VERSIONS | {"torch": "2.12"}}, "same versions", "torch 2.12 on b"),
        ({"python": "3.12.1"}, "same versions", "Python 3.11 on a; Python 3.12 on b"),
        ({"niceness": 15}, "Ray worker niceness", "niceness 15 on b"),
        ({"health_check": (3.0, 10.0, 5)}, "Ray health checks", "after up to 65 s"),
    ],
)
def test_nodes_that_differ_or_notice_failures_late_are_named(changes, check, words):
    results = check_together({"a": GOOD, "b": dataclasses.replace(GOOD, **changes)})
    assert [*levels(results)] == [check]
    assert any(words in result.text and result.way_out for result in results)


@pytest.mark.parametrize(
    ("offset", "within", "level"),
    [(0.9, 0.0, "ok"), (-1.2, 0.1, "warning"), (1.2, 0.5, "ok"), (-1000.0, 1.0, "fails")],
)
def test_clock_is_judged_by_what_is_known_of_its_offset(offset, within, level):
    assert check_clock("b", offset, within).level == level


def test_minimum_versions_are_those_of_the_package():
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    asked = dict(each.split(">=") for each in project["dependencies"])
    for name, least in MINIMUM.items():
        assert (*map(int, asked[name].split(".")), 0)[:2] == least
    words = [".".join(map(str, version)) for version in PYTHON]
    assert project["requires-python"] == f">={words[0]},<{words[1]}"


def test_facts_of_this_machine_are_read_without_torch():
    facts = facts_of_this_machine("127.0.0.1")
    assert {"torch", "ray", "pyarrow"} <= facts.versions.keys() and facts.open_files
    assert facts.port_errors == () and facts.gpus is None


def test_ports_of_an_address_of_another_machine_cannot_be_bound():
    errors = facts_of_this_machine("203.0.113.1").port_errors
    assert [error[:5] for error in errors] == ["TCP: ", "UDP: "]


def test_gpu_that_torch_does_not_find_is_told_with_its_reason(monkeypatch):
    """Torch is asked in a process of its own; here it is a build without CUDA."""
    monkeypatch.setattr(node_facts, "_GPU_DEVICES", ("/dev/null",))
    gpus = facts_of_this_machine("127.0.0.1").gpus
    assert gpus.names == () and "built without CUDA" in gpus.error


# --------------------------------------------------------------------------------------- stores


def places(tmp_path):
    return {"file": str(tmp_path), "memory": f"memory://{uuid.uuid4().hex}"}


@pytest.mark.parametrize("kind", ["file", "memory"])
def test_store_that_works_is_measured_and_left_as_it_was(tmp_path, kind, monkeypatch):
    monkeypatch.setattr("elastic_dp.cluster.doctor.store_check.LARGE_BYTES", 1 << 16)
    url = places(tmp_path)[kind]
    Store(url).write(f"{Store(url).path}/mine.txt", b"mine")
    results = check_store(StorageURL(url), "token")
    checks = ["conditional writes", "object versions", "store latency", "store speed", "deletes"]
    assert [result.check for result in results] == checks
    assert not {level for level in levels(results).values() if level == "fails"}
    assert [entry.path.rpartition("/")[2] for entry in Store(url).find(f"{Store(url).path}/")] == [
        "mine.txt"
    ]
    assert kind == "memory" or [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_store_that_overwrites_what_was_to_be_created_once_fails(tmp_path, monkeypatch):
    write = Store.write

    def overwrites(store, path, content, *, create_only=False):
        write(store, path, content)

    monkeypatch.setattr(Store, "write", overwrites)
    (result, *_) = check_store(StorageURL(str(tmp_path)), "token")
    assert (result.check, result.level) == ("conditional writes", "fails")
    assert "overwrites an object" in result.text and "s3://" in result.way_out
    assert not list(tmp_path.iterdir())


def test_store_that_lets_two_writers_at_once_create_an_object_fails(tmp_path, monkeypatch):
    """One by one it refuses them, which is all that a simple test sees."""
    write = Store.write

    def races(store, path, content, *, create_only=False):
        write(store, path, content, create_only=create_only and not path.endswith("/race"))

    monkeypatch.setattr(Store, "write", races)
    (result, *_) = check_store(StorageURL(str(tmp_path)), "token")
    assert (result.level, result.text) == ("fails", "8 of 8 writers at once created one object")


def test_store_that_cannot_be_written_is_one_failure_with_the_reason(tmp_path):
    (tmp_path / "file").write_text("")
    (result,) = check_store(StorageURL(str(tmp_path / "file")), "token")
    assert (result.check, result.level) == ("store", "fails") and "file" in result.text


# -------------------------------------------------------------------------------------- command


def asked(*words, code, colours=False):
    env = {"FORCE_COLOR": "1" if colours else None, "COLUMNS": "80", "RAY_ADDRESS": None}
    said = CliRunner(env=env).invoke(app, ["doctor", *map(str, words)], catch_exceptions=False)
    assert said.exit_code == code, said.output
    return said.stdout


@pytest.mark.parametrize("colours", [False, True])
def test_doctor_prints_one_line_for_each_check_and_the_sum(tmp_path, colours):
    text = asked("--storage-path", tmp_path, code=0, colours=colours)
    assert ("\x1b[" in text) == colours
    *lines, last = re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()
    assert all(line.split()[0] in ("ok", "warning") for line in lines) and len(lines) == 10
    assert last.startswith("10 ok, 0 warnings") or "warning" in last
    assert last.endswith("no cluster was checked: --address HOST:6379")


def test_doctor_ends_with_code_1_and_says_what_to_do_where_something_fails(tmp_path, monkeypatch):
    bad = dataclasses.replace(GOOD, open_files=100, port_errors=("TCP: refused",))
    monkeypatch.setattr(node_facts, "facts_of_this_machine", lambda host: bad)
    text = asked(code=1)
    assert re.search(r"^fails +ports +no free port .*TCP: refused\. To do: allow", text, re.M)
    assert re.search(r"^warning +open files .*\. To do: ulimit -n 65536", text, re.M)
    assert text.splitlines()[-1].startswith("3 ok, 1 warning, 1 failure; no cluster was checked")
    said = json.loads(asked("--json", code=1))
    assert said["ok"] is False
    assert {each["check"]: each["level"] for each in said["checks"]}["ports"] == "fails"


def test_doctor_of_a_cluster_that_does_not_answer_says_so_beside_the_other_checks(monkeypatch):
    def gone(address):
        raise ClusterError("cannot connect to a Ray cluster at head:1: give --address")

    monkeypatch.setattr(cluster_connection, "connect", gone)
    text = asked("--address", "head:1", code=1)
    assert "fails    cluster" in text and "cannot connect to a Ray cluster at head:1" in text
    assert "ok       ports" in text


def test_ports_that_no_datagram_reaches_are_told(monkeypatch):
    receive = socket.socket.recv

    def nothing(self, *more):
        if self.type == socket.SOCK_DGRAM:
            raise TimeoutError("timed out")
        return receive(self, *more)

    monkeypatch.setattr(socket.socket, "recv", nothing)
    assert facts_of_this_machine("127.0.0.1").port_errors == ("UDP: timed out",)
