"""`elastic-dp doctor`: each check is seen to find what it is for."""

import dataclasses
import json
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from elastic_dp.cli import app
from elastic_dp.cluster.ray import cluster_connection
from elastic_dp.errors import ClusterError, StorageError
from elastic_dp.extensions import doctor
from elastic_dp.extensions.doctor import NodeFacts, check_machine, check_store, check_versions_equal
from elastic_dp.storage import Store
from elastic_dp.urls import StorageURL

VERSIONS = {"elastic_dp": "0.1.0", "torch": "2.13.0+cpu", "ray": "2.60.0", "pyarrow": "26.0.1"}
GOOD = NodeFacts("3.11.7", VERSIONS)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"python": "3.10.2"}, "Python 3.10.2 is not 3.11 to 3.13"),
        ({"python": "3.14.0"}, "Python 3.14.0 is not"),
        ({"versions": VERSIONS | {"torch": "2.9.1"}}, "2.9.1 is older than 2.11"),
        ({"versions": {"torch": "2.13"}}, "ray is not installed; pyarrow"),
    ],
)
def test_machine_with_one_fault_fails_for_that(changes, words):
    assert check_machine(GOOD).level == "ok"
    wrong = check_machine(dataclasses.replace(GOOD, **changes), "node 1")
    assert (wrong.level, wrong.where) == ("fails", "node 1")
    assert words in wrong.text and wrong.remedy


def test_nodes_of_different_versions_are_named():
    assert check_versions_equal({"a": GOOD, "b": GOOD}).level == "ok"
    other = dataclasses.replace(GOOD, versions=VERSIONS | {"torch": "2.12"})
    found = check_versions_equal({"a": GOOD, "b": other})
    assert found.level == "fails" and "torch 2.12, ray 2.60.0, pyarrow 26.0.1 on b" in found.text


@pytest.mark.parametrize(
    ("offset", "within", "level"),
    [(0.9, 0.0, "ok"), (-1.2, 0.1, "warning"), (1.2, 0.5, "ok"), (-1000.0, 1.0, "fails")],
)
def test_clock_is_judged_by_what_is_known_of_its_offset(offset, within, level):
    assert doctor.check_clock("b", offset, within).level == level


def test_minimum_versions_are_those_of_the_package():
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    asked = dict(each.split(">=") for each in project["dependencies"])
    for name, least in doctor.MINIMUM.items():
        assert (*map(int, asked[name].split(".")), 0)[:2] == least
    words = [".".join(map(str, version)) for version in doctor.PYTHON]
    assert project["requires-python"] == f">={words[0]},<{words[1]}"


def test_store_that_works_has_two_ok_and_is_left_empty(tmp_path):
    found = check_store(StorageURL(str(tmp_path)), "token")
    assert [(one.check, one.level) for one in found] == [
        ("store", "ok"),
        ("create-only writes", "ok"),
    ]
    assert not list(tmp_path.iterdir())


def test_store_that_creates_an_object_twice_or_is_away_fails(tmp_path, monkeypatch):
    write = Store.write
    monkeypatch.setattr(
        Store, "write", lambda store, path, content, **_: write(store, path, content)
    )
    found = check_store(StorageURL(str(tmp_path)), "token")
    assert [one.level for one in found] == ["ok", "fails"] and found[1].remedy

    def away(*_, **__):
        raise StorageError("the store is away")

    monkeypatch.setattr(Store, "write", away)
    (found,) = check_store(StorageURL(str(tmp_path)), "token")
    assert found.level == "fails" and "the store is away" in found.text


def test_doctor_prints_what_to_do_and_exits_with_1_where_something_fails(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    words = ["doctor", "--storage-path", str(tmp_path / "file")]
    said = CliRunner().invoke(app, words)
    assert said.exit_code == 1 and "To do: see that the path exists" in said.stdout
    assert "1 failure; no cluster was checked" in said.stdout

    def gone(*_):
        raise ClusterError("cannot connect: give --address")

    monkeypatch.setattr(cluster_connection, "connect", gone)
    said = CliRunner().invoke(app, ["doctor", "--json", "--address", "head:6379"])
    checks = {one["check"]: one for one in json.loads(said.stdout)["checks"]}
    assert checks["cluster"]["level"] == "fails" and checks["versions"]["level"] == "ok"
