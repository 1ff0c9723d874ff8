"""What a driver asks of a run, where its controller answers as it must here."""

import dataclasses
from unittest import mock

import pytest

import elastic_dp as edp
from elastic_dp.cluster.run_handle import Run
from elastic_dp.cluster.runs.run_history import StartRecord
from elastic_dp.errors import ClusterError, SpecError
from elastic_dp.run_record import Result, RunLimits, write_result
from elastic_dp.storage import Store
from tests.runs import spec_of


@pytest.mark.parametrize("is_new", [False, True])
def test_only_who_starts_a_controller_compares_its_start(monkeypatch, tmp_path, is_new):
    from elastic_dp.cluster.runs import attach

    said, controller = [], mock.Mock()
    controller.tell.remote = lambda *given: said.append(given)
    monkeypatch.setattr(attach, "find_or_start", lambda *_: (controller, is_new))
    shards = tmp_path / "data"
    shards.mkdir()
    rows(shards)
    data = edp.DataConfig(str(shards), micro_batch_size=4)
    made = edp.ElasticTrainer(print, data=data, name="job", storage_path=str(tmp_path), max_steps=1)
    of_before = StartRecord.of(made.spec, print)
    dataclasses.replace(of_before, sharding="optimizer").write(Store(str(tmp_path / "job")))
    made.start()
    told = any("sharding is None now" in text for _, text in said)
    assert told == is_new


def rows(folder):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"x": list(range(64))}), folder / "part-0.parquet", row_group_size=8)


def result_of(url):
    numbers = {"step": 1, "generations": 1, "workers_lost": 0, "wall_s": 1.0}
    texts = {"name": "job", "path": url, "reason": "enough", "weights_sha256": ""}
    return Result(**texts, **numbers, exact=True, inexact_because=(), skipped=(), metrics={})


def test_logs_are_followed_until_the_run_ends_and_then_to_their_end(monkeypatch, tmp_path):
    run = Run(spec_of(), str(tmp_path), controller=object())
    logs = tmp_path / "logs"
    logs.mkdir()

    def ask(method, *args):
        printed = (logs / "w1.log").exists()
        (logs / "w1.log").write_text("one\ntwo\ntwo\n" if printed else "one\n")
        if not printed:
            return None
        (logs / "w2.log").write_text("only here\n")
        write_result(str(tmp_path), result_of(str(tmp_path)), RunLimits())  # by another driver
        raise ClusterError("the controller is gone")

    monkeypatch.setattr(run, "_ask", ask)
    lines = [("w1", "one"), ("w1", "two"), ("w1", "two"), ("w2", "only here")]
    assert list(run.logs(follow=True)) == lines
    with pytest.raises(SpecError, match=r"must be one of those in .*: w1, w2"):
        list(run.logs("w3"))


def test_the_result_of_a_run_that_had_ended_is_its_own(tmp_path):
    url = str(tmp_path)
    write_result(url, result_of(url), RunLimits())
    assert Run(spec_of(), url, controller=object())._stored() is None
    assert Run(spec_of(), url, controller=object(), ended=True)._stored() == result_of(url)


@pytest.fixture
def answered(monkeypatch, tmp_path):
    """A run of two workers."""
    run = Run(spec_of(), str(tmp_path), controller=object())
    answers = {"status": {"min_workers": 1, "size": 2}, "drain": ["w1", "w2"]}
    monkeypatch.setattr(run, "_ask", lambda method, *args: answers[method])
    return run


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (("nobody",), "worker is 'nobody', must be one of w1, w2"),
        (("w1", -1), "within_s is -1"),
        (("w1", "soon"), "within_s is 'soon'"),
    ],
)
def test_a_drain_that_cannot_be(answered, asked, words):
    with pytest.raises(SpecError, match=words):
        answered.drain(*asked)
