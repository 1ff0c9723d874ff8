"""What workers print is in the run's folder, bounded, soon, and also of those that died."""

import os
import sys
from pathlib import Path

import pytest

from elastic_dp.cluster import worker_logs
from elastic_dp.cluster.worker_logs import HEAD_BYTES, TAIL_BYTES, WorkerLogUploader, read_logs
from elastic_dp.errors import StorageError
from elastic_dp.storage import Store
from tests.cluster.test_budgets import is_first
from tests.patience import eventually
from tests.runs import group, spec_of
from tests.train.jobs import adamw, classifier, cross_entropy, hold


@pytest.fixture
def printed(tmp_path):
    """A file as a worker's output, and its keeper."""
    with open(tmp_path / "out", "a+b", buffering=0) as file:
        yield file, WorkerLogUploader(Store(str(tmp_path / "run")), "w1", [file.fileno()])


def kept(tmp_path, name="w1.log"):
    path = tmp_path / "run" / "logs" / name
    return path.read_bytes() if path.exists() else b""


def test_a_long_output_keeps_its_beginning_and_its_end(printed, tmp_path):
    file, keeper = printed
    file.write(b"first" + b"x" * (HEAD_BYTES + TAIL_BYTES) + b"last")
    keeper.start().close(60.0)
    copy = kept(tmp_path)
    assert copy.startswith(b"firstx") and copy.endswith(b"xlast")
    assert "… 9 bytes are left out".encode() in copy
    assert len(copy) < HEAD_BYTES + TAIL_BYTES + 100


def test_notes_of_ray_are_no_lines_of_a_worker_s_output(printed, tmp_path):
    file, keeper = printed
    file.write(b":job_id:01000000\n:actor_name:WorkerActor\none\n:job_id is a word\ntwo\n")
    keeper.start().close(60.0)
    store = Store(str(tmp_path / "run"))
    assert [*read_logs(store)] == [("w1", "one"), ("w1", ":job_id is a word"), ("w1", "two")]
    assert [*read_logs(store, "w1", tail=3)] == [*read_logs(store)]  # and take no place


def test_log_is_copied_while_the_worker_lives_and_only_when_it_grew(printed, tmp_path, monkeypatch):
    monkeypatch.setattr(worker_logs, "EVERY_S", 0.01)
    file, keeper = printed
    writes = []
    write = Store.write
    monkeypatch.setattr(Store, "write", lambda *args: writes.append(args[1]) or write(*args))
    keeper.start()
    for words in (b"one ", b"two "):
        file.write(words)
        eventually(lambda n=words: kept(tmp_path).endswith(n))
    keeper.close(60.0)
    assert kept(tmp_path) == b"one two " and len(writes) == 2


def test_log_keeper_with_a_failing_store_goes_on_and_copies_when_it_is_back(
    printed, tmp_path, monkeypatch
):
    monkeypatch.setattr(worker_logs, "EVERY_S", 0.01)
    (tmp_path / "run").write_text("a file, and no folder")
    file, keeper = printed
    file.write(b"words")
    failed = []
    write = Store.write

    def fails_at_first(*args):
        try:
            return write(*args)
        except (StorageError, OSError) as error:
            failed.append(error)
            raise

    monkeypatch.setattr(Store, "write", fails_at_first)
    keeper.start()
    eventually(lambda: len(failed) >= 2)
    (tmp_path / "run").unlink()
    eventually(lambda: kept(tmp_path) == b"words")
    keeper.close(60.0)
    assert not keeper._thread.is_alive()


def talks(ctx):
    model = classifier()
    for step in ctx.steps(model, adamw(model), cross_entropy):
        hold(ctx, step)
        print(f"step {step.number} of rank {ctx.rank}")
        if step.number == 5 and ctx.rank == 1 and is_first(ctx.config["aborts"]):
            os.write(2, b"the last words of a process\n")  # as a C library does
            os.abort()
        if step.number == 6:  # they are told by its sidecar, which may be slow
            eventually(lambda: [*Path(ctx.config["logs"]).glob("*.last.log")])
        print("no secret", file=sys.stderr)


def test_each_worker_s_output_is_in_the_run_s_folder(tmp_path):
    logs = tmp_path / "run" / "logs"
    config = {"hold": {1: 2}, "logs": str(logs), "aborts": str(tmp_path / "aborts")}
    spec = spec_of(workers=2, min_workers=2, virtual=2, steps=8, config=config)
    group(spec, talks, url=str(tmp_path / "run"))
    names = {path.name for path in (tmp_path / "run" / "logs").iterdir()}
    last = [name for name in names if name.endswith(".last.log")]
    assert len(last) == 1
    words = kept(tmp_path, last[0]).decode()
    assert "step 5 of rank 1" in words and words.endswith("the last words of a process\n")
    survivor = "w1.log" if last == ["w2.last.log"] else "w2.log"
    assert {survivor, "w3.log"} <= names
    assert "step 8 of rank" in kept(tmp_path, survivor).decode()
    assert kept(tmp_path, survivor).count(b"no secret\n") == 8


@pytest.mark.parametrize("worker", ["../../etc/x", "/etc/x", "s3://x", "a\0b", "..", ""])
def test_a_worker_s_name_leads_nowhere_else(tmp_path, worker):
    words = worker_logs.CrashLogWriter(Store(str(tmp_path / "run")))
    words.keep(worker, "owned")
    words.keep("w1", "ended")
    words.close()
    files = [path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()]
    assert files == [Path("run/logs/w1.last.log")]
