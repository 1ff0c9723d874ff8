"""A few inputs of each kind on every change."""

import io
import tarfile

import pytest

from tests.data.fuzz import judging, running
from tests.data.fuzz.mutations import KINDS, Damaged, mutated
from tests.data.fuzz.running import run


def test_damaged_files_give_rows_or_typed_errors_and_nobody_dies():
    tried = run(",".join(KINDS), 0, 15 * len(KINDS))
    assert tried.inputs == 15 * len(KINDS)
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

def spoilt(path):
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
judging._REFERENCES["tar"] = (lambda path, damaged, ours: {"c0": [7]},)
"""


def test_a_fault_of_the_reader_is_a_finding_of_its_input(monkeypatch):
    """The inputs behind the fault are tried in another process."""
    monkeypatch.setattr(running, "HANG_S", 0.5)
    monkeypatch.setattr(running, "BEFORE", SPOILT)
    tried = run("tar", 2, 6)
    assert tried.inputs == 6
    found = {seed: text for seed, text in tried.findings if text.startswith("read")}
    assert sorted(found) == [3, 4, 5, 6]
    assert found[3].startswith("read: the process ended with -6")
    assert found[4].startswith("read: an untyped error: KeyError: 'x'")
    assert found[5].startswith("read: 1000 rows for 1 of column 'c0'")
    assert found[6].startswith("read: no end within 0.5 s")


def tar():
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w") as members:
        for name in ("0.txt", "1.txt", "2.txt"):
            member = tarfile.TarInfo(name)
            member.size = 1
            members.addfile(member, io.BytesIO(b"x"))
    return sink.getvalue()


WHOLE = Damaged(tar(), whole=True)


@pytest.fixture
def uncut(monkeypatch):
    """The sizes of row groups stay as they are in this process."""
    monkeypatch.setattr(judging, "_cut_small", lambda rng: None)


def test_rows_that_differ_from_the_reference_are_a_finding(monkeypatch, tmp_path, uncut):
    assert judging.judge("tar", WHOLE, tmp_path, 1, lambda way: None) == "rows"
    read = judging._in_place

    def spoilt(path):
        return {name: values[:-1] for name, values in read(path).items()}

    monkeypatch.setattr(judging, "_in_place", spoilt)
    with pytest.raises(judging.Finding, match=r"rows for|must be"):
        judging.judge("tar", WHOLE, tmp_path, 1, lambda way: None)
