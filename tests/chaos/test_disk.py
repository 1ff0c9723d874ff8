"""A disk that is full: training goes on, nothing committed is lost, and what was deferred is done
when there is room.

The disks are small, of memory, and mounted here, so this needs root.
"""

import contextlib
import dataclasses
import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from elastic_dp.checkpoint import uploader
from elastic_dp.checkpoint.catalog import Catalog
from elastic_dp.coordinator.messages import StopRequested
from elastic_dp.errors import StorageError
from elastic_dp.storage import Store, retry
from elastic_dp.telemetry.journal import Journal
from elastic_dp.testing.process_worker_group import ProcessRun
from elastic_dp.train.interruption import INTERRUPTED_REASON
from tests.chaos.cluster import ROOT
from tests.chaos.hosts import folder
from tests.patience import PATIENCE_S, eventually
from tests.runs import local
from tests.train.checkpointing.test_worker_checkpointer import job
from tests.train.jobs import average_and_plateau

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a disk"),
]


@pytest.fixture
def disk():
    """A disk of 2 MB."""
    path = folder()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", path], check=True)
    yield Path(path)
    subprocess.run(["umount", "--lazy", path], check=True)
    os.rmdir(path)


@contextlib.contextmanager
def full(disk):
    with open(disk / "filling", "ab", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    yield
    os.unlink(disk / "filling")


def with_frequent_checkpoints(ctx):
    uploader.PATIENCE_S = retry.LONGEST_PAUSE_S = 0.3
    average_and_plateau(ctx)


def test_the_disk_of_a_run_is_full_for_a_while(disk, monkeypatch):
    monkeypatch.setattr(retry, "LONGEST_PAUSE_S", 0.3)
    spec = job(steps=100_000, workers=2, body_s=0.1)
    failure = dataclasses.replace(spec.failure, storage_timeout_s=0.5)
    keep = dataclasses.replace(spec.checkpoint, num_to_keep=10)  # a removal would make room
    spec = dataclasses.replace(spec, failure=failure, checkpoint=keep)
    url = str(disk / "run")
    with ProcessRun(spec, with_frequent_checkpoints, journal=Journal(url), url=url) as run:
        wait(run, lambda: said(run, "checkpoint of step 5 is committed"))
        with full(disk):
            before = names(url)
            wait(run, lambda: said(run, "No space left on device"))
            committed, step = names(url), run.controller.status()["step"]
            wait(run, lambda: run.controller.status()["step"] >= step + 3)
            assert names(url) == committed and committed[: len(before)] == before
        wait(run, lambda: said(run, "is back"))
        run.controller.post(StopRequested("enough"))
        outcome = run.wait(PATIENCE_S)
    assert outcome.error is None, outcome.traceback
    calm = local(job(steps=outcome.step), average_and_plateau)
    assert (outcome.digest, outcome.workers_lost) == (calm.digest, 0)
    assert names(url)[-1] == outcome.step
    lines = (disk / "run" / "metrics.jsonl").read_text().splitlines()
    assert [line["step"] for line in whole(lines)] == [x["step"] for x in calm.logged]


def test_interrupt_ends_a_run_whose_disk_is_full(disk, monkeypatch):
    monkeypatch.setattr(retry, "LONGEST_PAUSE_S", 0.3)
    spec = job(steps=100_000, workers=2, body_s=0.1)
    failure = dataclasses.replace(spec.failure, storage_timeout_s=0.5)
    spec, url = dataclasses.replace(spec, failure=failure), str(disk / "run")
    with ProcessRun(spec, with_frequent_checkpoints, journal=Journal(url), url=url) as run:
        wait(run, lambda: said(run, "checkpoint of step 5 is committed"))
        with full(disk):
            wait(run, lambda: said(run, "No space left on device"))
            run.controller.post(StopRequested(INTERRUPTED_REASON))
            outcome = run.wait(PATIENCE_S)
    assert outcome.error is None and outcome.reason == INTERRUPTED_REASON


def test_a_disk_without_room_for_a_link_is_full_and_not_one_that_has_none(tmp_path, monkeypatch):
    def link(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(StorageError, match="No space left on device") as raised:
        Store(str(tmp_path), timeout_s=0.0).write(str(tmp_path / "a"), b"b", create_only=True)
    assert "hard links" not in str(raised.value)


PRINTS = """
import os, sys
from elastic_dp.cluster.worker_logs import print_whatever_fits
os.dup2(os.open("out", os.O_RDWR | os.O_CREAT), 1)
print_whatever_fits()
for words in sys.stdin:
    print(words * 1000)
    print("done", file=sys.stderr)
"""


def test_worker_that_prints_to_a_full_disk_loses_the_output_and_goes_on(disk):
    command = [sys.executable, "-c", PRINTS]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, cwd=disk, env=environment, text=True, **pipes) as worker:

        def say(words):
            worker.stdin.write(f"{words}\n")
            worker.stdin.flush()
            assert worker.stderr.readline() == "done\n"

        say("before")
        with full(disk):
            say("meanwhile")
        say("after")
    printed = (disk / "out").read_text()
    assert printed.startswith("before") and printed.endswith("after\n\n")
    assert printed.count("meanwhile") < 1000


def whole(lines):
    """A line that did not fit stays, cut short, and is written again."""
    for line in lines:
        with contextlib.suppress(ValueError):
            yield json.loads(line)


def names(url):
    return [name.step for name in Catalog(Store(url)).names()]


def said(run, text):
    return any(text in line.get("text", "") for *_, line in list(run.journal._kept))


def wait(run, condition):
    eventually(condition, lambda: (run.controller.status(), list(run.journal._kept)[-20:]))
