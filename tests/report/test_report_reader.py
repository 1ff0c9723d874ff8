"""The report of a folder: real journals, folders that grow, and what is damaged in them."""

import json
import uuid

import pytest

from elastic_dp.coordinator.messages import CheckpointRequested, SizeRequested, StopRequested
from elastic_dp.errors import StorageError
from elastic_dp.report.report_model import EventKind, RunPhase
from elastic_dp.report.report_reader import RunFolder
from elastic_dp.storage import Store
from elastic_dp.storage.json_files import path_in
from elastic_dp.telemetry import journal_reader
from elastic_dp.telemetry.goodput import goodput_of
from elastic_dp.telemetry.journal import Journal
from elastic_dp.telemetry.journal_reader import read_events
from elastic_dp.testing import ProcessRun
from elastic_dp.urls import StorageURL
from tests.patience import eventually
from tests.report.journals import T0, night
from tests.runs import ENDLESS, goes_on, spec_of
from tests.train.jobs import plain


def write(folder, lines):
    """Write as a journal does: events to one file, metrics to the other."""
    folder.mkdir(exist_ok=True)
    for name in ("events", "metrics"):
        with (folder / f"{name}.jsonl").open("a") as file:
            for line in lines:
                if ("event" in line or "command" in line) == (name == "events"):
                    file.write(json.dumps(line) + "\n")


def url(folder):
    return StorageURL(str(folder))


def test_report_of_a_folder_that_grows_is_that_of_the_whole_folder(tmp_path):
    growing, lines = RunFolder("night", url(tmp_path / "a")), night()
    for at in range(0, len(lines), 5):
        write(tmp_path / "a", lines[at : at + 5])
        report = growing.report(T0 + 12)
    assert report == RunFolder("night", url(tmp_path / "a")).report(T0 + 12)
    assert report.phase is RunPhase.FINISHED and len(report.events) == 13


def test_folder_on_a_store_whose_objects_are_rewritten_is_followed(monkeypatch):
    monkeypatch.setattr(journal_reader, "_CHUNK_BYTES", 512)  # several reads of one object
    where = StorageURL(f"memory://{uuid.uuid4().hex}/night")
    store, lines = Store(where), night()
    growing = RunFolder("night", where)
    for at in range(5, len(lines) + 5, 5):
        events = [json.dumps(line) + "\n" for line in lines[:at] if "step" not in line]
        store.write(path_in(store, "events.jsonl"), "".join(events).encode())
        report = growing.report(T0 + 12)
    assert not growing.is_local
    assert report == RunFolder("night", where).report(T0 + 12) and report.lost == 1


def test_line_that_is_not_complete_is_taken_when_it_is(tmp_path):
    folder = RunFolder("night", url(tmp_path))
    text = json.dumps(night()[0])
    (tmp_path / "events.jsonl").write_text(text[:20])
    assert folder.report(T0).starts == 0
    (tmp_path / "events.jsonl").write_text(text + "\n")
    assert folder.report(T0).starts == 1


def test_folder_that_was_replaced_is_read_again(tmp_path):
    write(tmp_path, night())
    folder = RunFolder("night", url(tmp_path))
    assert folder.report(T0 + 12).lost == 1
    (tmp_path / "events.jsonl").unlink()
    (tmp_path / "metrics.jsonl").unlink()
    write(tmp_path, night()[:3])
    report = folder.report(T0 + 12)
    assert (report.lost, report.starts, report.curves) == (0, 1, {})


def test_store_that_fails_between_the_files_of_a_journal_hides_no_event(monkeypatch):
    where = StorageURL(f"memory://{uuid.uuid4().hex}/night")
    store, lines, read = Store(where), night(), Store.read
    folder = RunFolder("night", where)
    metrics = [line for line in lines if not {"event", "command"} & line.keys()]
    events = [line for line in lines if line not in metrics]
    for name, some in (("events", events), ("metrics", metrics)):
        text = "".join(f"{json.dumps(line)}\n" for line in some)
        store.write(path_in(store, f"{name}.jsonl"), text.encode())

    def failing(store, path, *span):
        if "metrics" in path:
            raise StorageError("503")
        return read(store, path, *span)

    monkeypatch.setattr(Store, "read", failing)
    with pytest.raises(StorageError, match="503"):
        folder.report(T0 + 12)
    monkeypatch.setattr(Store, "read", read)
    assert folder.report(T0 + 12) == RunFolder("night", where).report(T0 + 12)


def test_folder_without_a_journal_has_an_empty_report(tmp_path):
    report = RunFolder("night", url(tmp_path / "none")).report(T0)
    assert (report.events, report.step) == ([], 0)
    assert report.verdict[0] == "The run has made no step yet: nothing has happened."


@pytest.mark.parametrize("content", ["", "{", '{"format": 99}', '{"step": "x"}'])
def test_damaged_result_does_not_hide_the_journal(content, tmp_path):
    write(tmp_path, night())
    (tmp_path / "result.json").write_text(content)
    assert RunFolder("night", url(tmp_path)).report(T0).phase is RunPhase.FINISHED


def members(run):
    membership = run.controller.coordinator.membership
    return [] if membership is None else [member.worker for member in membership.members]


def two_train(run):
    """Whichever is killed then, the other one has the state."""
    status = run.controller.status()
    return (status["phase"], status["world_size"]) == ("running", 2)


def test_report_of_a_real_run_with_a_kill_and_a_join_has_both(tmp_path):
    path = str(tmp_path)
    spec = spec_of(steps=ENDLESS, workers=2, virtual=4, config={"body_s": 0.1})
    with ProcessRun(spec, plain, journal=Journal(path), url=path) as run:
        eventually(lambda: two_train(run), run.controller.status)
        killed = members(run)[-1]
        run.worker_group.kill(killed)
        eventually(lambda: len(members(run)) == 2 and killed not in members(run))
        run.controller.post(CheckpointRequested())
        run.controller.post(SizeRequested(3))
        eventually(lambda: len(members(run)) == 3, run.controller.status)
        goes_on(run)
        run.controller.post(StopRequested("enough"))
        outcome = run.wait()
    report = RunFolder("run", url(tmp_path)).report(0.0)
    kinds = {event.kind for event in report.events}
    assert kinds == {"start", "join", "loss", "pause", "checkpoint", "scale", "stop", "end"}
    assert [event.worker for event in report.events if event.kind is EventKind.LOSS] == [killed]
    assert (report.lost, report.step) == (outcome.workers_lost, outcome.step)
    assert max(size.present for size in report.band) == 3
    assert report.goodput == goodput_of(read_events(path))
    assert any(row.step_s and row.steps for row in report.workers)
    assert report.verdict[2] == f"Its final weights are in the checkpoint of step {outcome.step}."
