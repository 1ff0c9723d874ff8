"""A few inputs of each kind on every change."""

import bz2
import gzip
import io
import json
import tarfile

import pytest
import zstandard

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


ROWS = [{"a": 1, "s": "é"}, {"a": None, "s": "x"}, {"a": 3, "s": "]"}]
CSV = "a;s\n1;é\nnone;x\n3;]\n".encode("cp1252")
CSV_OPTIONS = {"delimiter": ";", "encoding": "cp1252", "null_values": ["none"]}
LINES = "\n".join(map(json.dumps, ROWS)).encode()


def tar():
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w") as members:
        for name in ("0.txt", "1.txt", "2.txt"):
            member = tarfile.TarInfo(name)
            member.size = 1
            members.addfile(member, io.BytesIO(b"x"))
    return sink.getvalue()


@pytest.fixture
def uncut(monkeypatch):
    """The sizes of row groups stay as they are in this process."""
    monkeypatch.setattr(judging, "_cut_small", lambda rng: None)


WHOLE = {
    "csv-options": Damaged(CSV, True, ".csv", csv_options=CSV_OPTIONS),
    "csv-compressed": Damaged(zstandard.compress(b"a,s\n1,x\n2,y\n"), True, codec=".zst"),
    "jsonl-compressed": Damaged(gzip.compress(LINES), True, codec=".gz"),
    "json-array": Damaged(json.dumps(ROWS).encode(), True, ".json"),
    "tar-compressed": Damaged(bz2.compress(tar()), True, codec=".bz2"),
}


def without_last_row(columns):
    return {name: values[:-1] for name, values in columns.items()}


@pytest.mark.parametrize(
    ("kind", "spoil"),
    [
        ("csv-compressed", without_last_row),
        ("tar-compressed", without_last_row),
    ],
)
def test_rows_that_differ_from_the_reference_of_their_kind_are_a_finding(
    kind, spoil, monkeypatch, tmp_path, uncut
):
    damaged = WHOLE[kind]
    judged = judging.judge(kind, damaged, tmp_path, 1, lambda way: None)
    assert judged.startswith("rows")
    read = judging._in_place
    monkeypatch.setattr(judging, "_in_place", lambda *given: spoil(read(*given)))
    with pytest.raises(judging.Finding, match=r"rows for|must be"):
        judging.judge(kind, damaged, tmp_path, 1, lambda way: None)


@pytest.mark.parametrize("kind", ["csv-compressed", "jsonl-compressed", "tar-compressed"])
def test_rows_of_a_compressed_file_that_is_cut_off_are_a_finding(
    kind, monkeypatch, tmp_path, uncut
):
    cut = Damaged(WHOLE[kind].content[:-2], codec=WHOLE[kind].codec)
    assert "rows" not in judging.judge(kind, cut, tmp_path, 1, lambda way: None).split()[0]
    monkeypatch.setattr(judging, "_in_place", lambda path, options: {"a": [1]})
    with pytest.raises(judging.Finding, match=f"read: rows of content that {cut.codec} refuses"):
        judging.judge(kind, cut, tmp_path, 1, lambda way: None)
