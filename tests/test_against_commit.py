"""`benchmarks.against_commit`: each side has its own tree, they take turns, and ratios are paired.
Its workloads use only what other commits have."""

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
