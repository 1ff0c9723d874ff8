"""A few inputs of each kind on every change; benchmarks/fuzz_data.py runs 10⁵ of them."""

import pytest

from tests.data.fuzz import running
from tests.data.fuzz.mutations import KINDS, Damaged, mutated
from tests.data.fuzz.running import run


def test_damaged_files_give_rows_or_typed_errors_and_nobody_dies():
    tried = run(",".join(KINDS), 0, 50 * len(KINDS))
    assert tried.inputs == 50 * len(KINDS)
    assert not tried.findings
    assert any(outcome.startswith("rows") for outcome in tried.outcomes)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_many_damaged_files_of_one_kind_give_rows_or_typed_errors(kind):
    tried = run(kind, 1_000_000, 4000)
    assert not tried.findings


@pytest.mark.parametrize("kind", KINDS)
def test_an_input_is_a_function_of_its_kind_and_number(kind):
    assert [mutated(kind, seed) for seed in range(5)] == [mutated(kind, seed) for seed in range(5)]
    assert len({mutated(kind, seed).content for seed in range(50)}) > 40


SPOILT = """
import os
from tests.data.fuzz import judging

def spoilt(path, folder):
    number = seeds.pop(0)
    if number == 3:
        os.abort()
    if number == 4:
        raise KeyError("x")
    if number == 5:
        return {"c0": [7] * 1000}
    while number == 6:
        pass
    return {}

judging._in_place = spoilt
judging._REFERENCES["csv"] = (lambda path, damaged, ours: {"c0": [7]},)
"""


def test_a_fault_of_the_reader_is_a_finding_of_its_input(monkeypatch):
    """The inputs behind the fault are tried in another process."""
    monkeypatch.setattr(running, "HANG_S", 0.5)
    monkeypatch.setattr(running, "BEFORE", SPOILT)
    tried = run("csv", 2, 6)
    assert tried.inputs == 6
    found = {seed: text for seed, text in tried.findings if text.startswith("read")}
    assert sorted(found) == [3, 4, 5, 6]
    assert found[3].startswith("read: the process ended with -6")
    assert found[4].startswith("read: an untyped error: KeyError: 'x'")
    assert found[5].startswith("read: 1000 rows for 1 of column 'c0'")
    assert found[6].startswith("read: no end within 0.5 s")


def test_a_whole_file_is_marked_as_such():
    assert any(
        mutated("csv", seed) == Damaged(mutated("csv", seed).content, True) for seed in range(20)
    )
