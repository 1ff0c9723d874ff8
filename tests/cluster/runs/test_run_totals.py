"""A result counts the whole life of its run, also starts that ended with their head node."""

import json

from elastic_dp.cluster.controller.run_report import RunReport
from elastic_dp.cluster.runs.controller_state import ControllerState, LossCounted, RunTotals
from elastic_dp.coordinator import messages as m
from elastic_dp.storage import Store
from elastic_dp.telemetry.goodput import ControllerStarted
from elastic_dp.telemetry.journal import Journal
from elastic_dp.telemetry.journal_reader import JournalTail
from tests.runs import spec_of


def formed(generation):
    member = m.Member("w1", ((0, 1),), m.TrainingPosition(0), True)
    return m.FormGeneration(m.Membership(generation, (member,), "w1", 5.0))


def start(url, clock, *messages):
    """One start of the run, which ends without a word; each message comes a second later."""
    journal = Journal(url)
    for message in messages:
        (journal.command if isinstance(message, m.FormGeneration) else journal.event)(message)
        clock[0] += 1.0
    journal.close()


def test_totals_add_up_all_starts_and_a_takeover_begins_none(tmp_path, monkeypatch):
    clock, url = [1000.0], str(tmp_path)
    monkeypatch.setattr("elastic_dp.telemetry.journal.time.time", lambda: clock[0])
    fresh, takes_over = ControllerStarted(2, False), ControllerStarted(2, True)
    start(url, clock, fresh, formed(1), LossCounted(1), formed(2), takes_over, LossCounted(2))
    clock[0] += 100.0  # nobody leads
    start(url, clock, fresh, formed(1), formed(4))
    assert RunTotals.of(JournalTail(Store(url)).lines_of("events")) == RunTotals(6, 2, 5.0 + 2.0)
    assert RunTotals.of([]) == RunTotals()


def test_result_counts_earlier_starts(tmp_path):
    report = RunReport(spec_of(), str(tmp_path), None)
    report.end(m.FinishRun(m.TrainingPosition(12), "digest", "the last step"), 3)
    state = ControllerState(lost=1, earlier=RunTotals(6, 2, 1000.0))
    report.close(state, 3, {})
    report.write_result(state)
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["generations"], result["workers_lost"]) == (9, 3)
    assert 1000.0 <= result["wall_s"] < 1100.0
