"""`benchmarks.against_commit`: each side has its own tree, they take turns, and ratios are paired.
Its workloads use only what other commits have."""

import json
import subprocess

import pytest

from benchmarks import against_commit, report
from benchmarks.paired import memory

# Measures nothing: its values are the tree's own, and each turn leaves a line.
WORKLOAD = """
import sys, elastic_dp
from benchmarks.paired import serve

def turn(number):
    with open({log!r}, "a") as log:
        log.write(f"{{elastic_dp.NAME}}{{number}} ")
    return {{sys.argv[2]: [elastic_dp.SECONDS * number, 0.0, 99.0]}}

serve(sys.argv[1], turn)
"""


@pytest.fixture
def trees(tmp_path, monkeypatch):
    """Two packages, and a workload that both run."""
    for name, seconds in (("a", 2.0), ("b", 3.0)):
        (tmp_path / name / "elastic_dp").mkdir(parents=True)
        text = f"NAME = {name!r}\nSECONDS = {seconds}\n"
        (tmp_path / name / "elastic_dp/__init__.py").write_text(text)
        (tmp_path / name / "workload.py").write_text(WORKLOAD.format(log=f"{tmp_path}/log"))
    return tmp_path / "a", tmp_path / "b"


def test_sides_take_turns_and_every_round_the_other_one_begins(trees, tmp_path):
    pairs = against_commit.compare("workload", "a case", trees, 3, tmp_path)
    assert pairs == {"a case": [(2.0, 3.0), (4.0, 6.0), (6.0, 9.0)]}
    turns = (tmp_path / "log").read_text().split()
    assert sorted(turns[:2]) == ["a0", "b0"]  # the warm-up, at the same time
    assert turns[2:] == ["a1", "b1", "b2", "a2", "a3", "b3"]


def test_side_that_imports_another_tree_is_an_error(trees, tmp_path):
    (tmp_path / "empty").mkdir()  # so it is found in this repository
    text = "import sys\nfrom benchmarks.paired import serve\nserve(sys.argv[1], lambda _: {})\n"
    (tmp_path / "empty/workload.py").write_text(text)
    with pytest.raises(RuntimeError, match=r"elastic_dp is from .*, not from .*/empty"):
        against_commit.compare("workload", "", (tmp_path / "empty", trees[0]), 1, tmp_path)


def test_side_that_ends_early_is_an_error_with_its_last_lines(trees, tmp_path):
    (trees[1] / "workload.py").write_text("raise SystemExit('no such case')")
    with pytest.raises(RuntimeError, match="no such case"):
        against_commit.compare("workload", "", trees, 1, tmp_path)


def test_ratio_is_the_median_of_each_rounds_ratio():
    found = against_commit.summary([(1.0, 1.1), (100.0, 90.0), (10.0, 10.2)], "s")
    assert found["ratio"] == 1.02  # not 10.2 / 10 of the medians of all, nor 101.3 / 111
    found = against_commit.summary([(100, 120), (100, 90), (200, 205)], "bytes")
    assert found["more_bytes"] == 5


def test_export_has_the_package_of_that_commit_only(tmp_path):
    repository = tmp_path / "repository"
    (repository / "elastic_dp").mkdir(parents=True)
    (repository / "README.md").write_text("")
    call = ["git", "-C", str(repository), "-c", "user.name=x", "-c", "user.email=x@y"]
    subprocess.run([*call, "init", "-q"], check=True)
    for text in ("then", "now"):
        (repository / "elastic_dp/__init__.py").write_text(text)
        subprocess.run([*call, "add", "."], check=True)
        subprocess.run([*call, "commit", "-q", "-m", text], check=True)
    tree = against_commit.export("HEAD~1", tmp_path, repository)
    assert [path.name for path in tree.iterdir()] == ["elastic_dp"]
    assert (tree / "elastic_dp/__init__.py").read_text() == "then"


@pytest.mark.parametrize(
    ("part", "unit", "low", "missed"),
    [
        ("step", "s", 1.01, None),
        ("step", "s", 1.011, "1.01 of then"),
        ("data", "s", 1.001, "1.0 of then"),
        ("memory", "bytes", memory.GRADIENT_BYTES, None),
        ("memory", "bytes", memory.GRADIENT_BYTES + 1, "one gradient more"),
    ],
)
def test_result_that_is_worse_with_all_of_its_interval_is_missed(part, unit, low, missed, capsys):
    measured = {"x": {"unit": unit, "interval": [low, 2 * low]}}
    found = against_commit.targets({"abc": {"subject": "", part: {"case": {"measured": measured}}}})
    assert report.exit_code(found) == (1 if missed else 0)
    said = f"missed: abc, {part}, case: x, {missed}\n" if missed else ""
    assert capsys.readouterr().out == said


def test_result_is_kept_beside_those_of_other_commits_and_cases(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    monkeypatch.setattr(against_commit, "git", lambda *words: words[0])
    for commit, part, case in (("a", "step", "x"), ("b", "step", "x"), ("a", "data", "y")):
        against_commit.keep(commit, part, case, {"measured": {}})
    against_commit.keep("a", "step", "x", {"measured": {"new": 1}})
    results = json.loads((tmp_path / "against_commit.json").read_text())["results"]
    assert sorted(results) == ["a", "b"]
    assert results["a"]["step"]["x"]["measured"] == {"new": 1}
    assert {"date", "now", "hardware"} < results["a"]["data"]["y"].keys()
