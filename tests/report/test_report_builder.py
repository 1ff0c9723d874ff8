"""The report of a run is a function of its journal."""

import json
import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_dp.report import metric_curves, report_builder
from elastic_dp.report.metric_curves import MOST_CURVES, MetricCurves
from elastic_dp.report.report_builder import ReportBuilder
from elastic_dp.report.report_model import EventKind, RunPhase, WorkerCondition
from elastic_dp.run_record import Result
from elastic_dp.telemetry.goodput import goodput_of
from tests.report.journals import (
    T0,
    command,
    event,
    explain,
    form,
    logged,
    lost,
    night,
    stopped,
    times,
)


def report_of(lines, now=T0 + 12, **more):
    builder = ReportBuilder("night")
    for line in lines:
        builder.line(line)
    return builder.build(now, **more)


def result_of(reason, *because):
    return Result("night", "", 1, reason, "", not because, because)


def test_report_has_each_event_of_the_journal_once_and_in_order():
    kinds = [(event.kind, event.worker) for event in report_of(night()).events]
    assert kinds == [
        ("start", ""),
        ("join", ""),
        ("loss", "w2"),
        ("pause", ""),
        ("pause", ""),
        ("join", "w3"),
        ("checkpoint", ""),
        ("notice", "w3"),
        ("pause", ""),
        ("leave", "w3"),
        ("scale", ""),
        ("stop", ""),
        ("end", ""),
    ]


def test_report_says_why_a_worker_was_lost_once_the_cause_is_known():
    (loss,) = [event for event in report_of(night()).events if event.kind is EventKind.LOSS]
    assert loss.text == "w2 is lost: preempted: its node was taken away"
    assert report_of(night()).lost == 1


def test_pause_lasts_from_the_loss_to_the_next_generation_and_has_the_reason():
    pauses = [event for event in report_of(night()).events if event.kind is EventKind.PAUSE]
    assert [round(event.seconds, 3) for event in pauses] == [0.5, 0.1, 0.1]
    assert pauses[0].text.startswith("w2 is lost: its process exits; then generation 2 with 1 wor")
    assert pauses[1].text == "1 worker joins; then generation 3 with 2 workers"
    pauses = [e.seconds for e in report_of(night()).events if e.kind is EventKind.PAUSE]
    assert sum(pauses) == pytest.approx(0.7)
    assert report_of(night()).generation == 4


def test_band_has_the_members_and_the_wanted_workers_over_time():
    band = report_of(night()).band
    assert [(round(at - T0, 1), here, wanted) for at, here, wanted in band] == [
        *((0, 0, 0), (0, 0, 3), (3, 2, 3), (6, 1, 3), (7.6, 2, 3), (9.7, 1, 3), (10, 1, 2)),
        (12, 0, 0),
    ]


def test_workers_have_their_stage_their_node_and_the_time_of_a_step():
    one, two, three = report_of(night()).workers
    assert (one.name, one.condition, one.node) == ("w1", WorkerCondition.ENDED, "node-1")
    assert (one.steps, one.step_s) == (6, pytest.approx((1 + 4 + 1 + 1) / 6))
    assert (two.condition, two.until, two.steps) == (WorkerCondition.LOST, T0 + 6, 2)
    assert (three.condition, three.reason) == (WorkerCondition.LEFT, "its node goes away")


def test_goodput_of_the_report_is_that_of_the_journal():
    assert report_of(night()).goodput == goodput_of(night())


def test_checkpoints_say_how_long_they_took_and_whether_they_are_stored():
    report = report_of(night(), stored={4, 6})
    assert [(row.step, row.stored) for row in report.checkpoints] == [(4, True), (6, True)]
    assert report.checkpoints[0].seconds == 0.5
    assert [row.stored for row in report_of(night(), stored=()).checkpoints] == [False]


def test_verdict_of_a_finished_run_has_three_sentences():
    report = report_of(night(), stored={6})
    assert report.phase is RunPhase.FINISHED
    assert report.verdict == (
        "The run finished (enough) after 6 steps in 12 s, with a loss that went from 2 to 1.",
        "It lost 1 worker: 1.5 % went into redone steps, 12 % into pauses, "
        "58 % into waiting for workers; 23 % of the workers' time made steps that count.",
        "Its final weights are in the checkpoint of step 6.",
    )


def test_verdict_of_a_running_run_says_whether_it_is_healthy():
    lines = night()[:13]
    assert report_of(lines, T0 + 6).verdict[2] == (
        "It needs a look: 2 of 3 workers train; there is no checkpoint yet."
    )
    full = [*lines, event(6, "SizeRequested", size=2), event(6, "CheckpointCommitted", step=2)]
    assert report_of(full, T0 + 9).verdict[2] == (
        "It is healthy: 2 of 2 workers train; the newest checkpoint is of step 2, 3.0 s ago."
    )


def test_run_whose_generations_end_without_a_step_needs_a_look():
    lines = [*night()[:13], event(6, "SizeRequested", size=2)]
    ends = [(stopped(6, "w1", n, 2), form(6, n + 1, "w1", "w2")) for n in range(1, 5)]
    thrice, four_times = sum(ends[:3], ()), sum(ends, ())
    assert "It is healthy" in report_of([*lines, *thrice], T0 + 6).verdict[2]
    report = report_of([*lines, *four_times], T0 + 6)
    assert "It needs a look: 4 failures without a step in between" in report.verdict[2]
    assert "It is healthy" in report_of([*lines, *four_times, logged(6, 3)], T0 + 6).verdict[2]


def test_run_that_others_limit_wants_no_more_than_they_leave():
    limit = {"most": 2, "reason": "run 'other' has priority 5, this one 0"}
    limited = [*night()[:13], event(6, "SizeLimited", **limit)]
    report = report_of(limited, T0 + 6)
    assert report.wanted == 2
    assert report.events[-1].text == "at most 2 workers: run 'other' has priority 5, this one 0"
    grown = [*limited, event(7, "SizeLimited", most=None, reason="no run limits it")]
    assert report_of(grown, T0 + 7).wanted == 3


def test_run_of_which_nothing_is_heard_is_silent_and_not_running():
    report = report_of(night()[:13], T0 + 400)
    assert report.phase is RunPhase.SILENT
    assert "nothing has been written for 7 min" in report.verdict[0]
    assert "its cluster may be gone" in report.verdict[2]
    alone = report_of([logged(1, 1)], T0 + 400)
    assert "It needs a look: its process may be gone; there is no" in alone.verdict[2]
    assert report_of([]).verdict[2] == "It is starting; there is no checkpoint yet."


def test_loss_has_a_curve_also_after_more_metrics_than_there_are_curves():
    many = {f"layer{i}": float(i) for i in range(100)}
    curves = report_of([{"time": T0, "step": 1} | many | {"loss": 2.0}]).curves
    assert len(curves) == MOST_CURVES + 1 and curves["loss"][0].value == 2.0


def test_failed_run_says_the_error_and_from_where_it_goes_on():
    failed = [*night()[:-6], command(12, "FailRun", error="KeyError: 'x'", traceback="")]
    report = report_of(failed, stored={4})
    assert report.phase is RunPhase.FAILED
    assert report.verdict[0].endswith("KeyError: 'x'.")
    assert report.verdict[2] == "Started again, it goes on from the checkpoint of step 4."
    deleted = report_of(failed, stored=())
    assert deleted.verdict[2].endswith("begins at its first step, because there is no checkpoint.")


def test_steps_that_were_logged_again_after_going_back_do_not_count():
    lines = [
        event(0, "ControllerStarted", size=1, takes_over=False),
        form(0, 1, "w1"),
        *(logged(n, n, loss=float(n)) for n in range(1, 5)),
        lost(5, "w1"),
        event(6, "CheckpointFound", step=2),
        form(7, 2, "w2"),
        logged(8, 3, loss=33.0),
    ]
    report = report_of(lines)
    assert [(p.step, p.counts) for p in report.curves["loss"]] == [
        *((1, True), (2, True), (3, False), (4, False), (3, True)),
    ]
    assert (report.step, report.rollbacks) == (3, 1)
    assert [e.text for e in report.events if e.kind is EventKind.ROLLBACK] == [
        "every worker with the state is gone: from step 4 back to step 2"
    ]


def test_workers_of_another_start_are_others_though_they_have_the_same_names():
    again = [{**line, "time": line["time"] + 100} for line in night()]
    report = report_of([*night(), *again], T0 + 200)
    assert (report.starts, report.lost, report.led_s) == (2, 2, pytest.approx(24))
    assert [(row.start, row.name) for row in report.workers] == [
        *((1, "w1"), (1, "w2"), (1, "w3"), (2, "w1"), (2, "w2"), (2, "w3")),
    ]


def test_run_in_one_process_is_told_by_its_decisions_and_its_result():
    lines = [logged(1, 1, loss=2.0), explain(1, "checkpoint of step 1 is committed")]
    report = report_of(lines, result=result_of("the last step", "an atomic add"))
    assert report.phase is RunPhase.FINISHED
    assert [row.step for row in report.checkpoints] == [1]
    assert report.verdict[0] == "The run finished (the last step) after 1 step."
    assert "not exact (an atomic add)" in report.verdict[2]
    goes_on = [*lines, logged(3, 2, loss=1.0)]
    assert report_of(goes_on, result=result_of("enough")).phase is RunPhase.RUNNING


def test_thinned_curve_keeps_its_ends_its_peaks_and_its_gaps():
    curves = MetricCurves()
    for step in range(1, 30_001):
        value = {7777: 1e6, 12_345: math.nan}.get(step, math.sin(step))
        curves.line(logged(step, step, loss=value))
    points = curves.points()["loss"]
    assert len(points) <= 2 * metric_curves.MOST_POINTS + 3
    assert max(later.step - p.step for p, later in pairwise(points)) < 100
    assert points[-1].step == 30_000
    assert [p.step for p in points if p.value == 1e6] == [7777]
    assert [p.step for p in points if p.value is None] == [12_345]


def test_long_history_keeps_its_newest_events(monkeypatch):
    monkeypatch.setattr(report_builder, "MOST_EVENTS", 20)
    lines = [event(n, "SizeRequested", size=n) for n in range(1, 100)]
    report = report_of(lines)
    assert len(report.events) <= 20 and report.events[-1].text == "99 workers asked for"


def test_report_is_json_without_values_that_browsers_refuse():
    lines = [*night(), logged(13, 7, loss=math.nan, lr=math.inf, big=10**400, text="<b>")]
    text = json.dumps(report_of(lines).to_json(), allow_nan=False)
    assert "T" not in json.loads(text)["curves"] and "<b>" not in text


def test_report_shows_no_credentials_of_a_url():
    lines = [explain(1, "cannot read s3://key:secret@bucket/x and https://h/x?sig=abc")]
    assert "secret" not in str(report_of(lines)) and "abc" not in str(report_of(lines))


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=4,
)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_damaged_line_is_ignored_and_the_report_is_still_json(data):
    lines = night()
    for _ in range(3):
        at = data.draw(st.integers(0, len(lines) - 1))
        lines[at] = {key: data.draw(values | st.just(value)) for key, value in lines[at].items()}
        if not isinstance(lines[at].get("time"), int | float):
            lines[at]["time"] = T0 + at
    report = report_of([*lines, *night()])
    json.dumps(report.to_json(), allow_nan=False)
    assert report.starts >= 1


def test_report_of_a_journal_that_comes_line_by_line_is_that_of_the_whole():
    builder = ReportBuilder("night")
    for number, line in enumerate(night(), 1):
        builder.line(line)
        now = line["time"]
        assert builder.build(now) == report_of(night()[:number], now)


def test_step_time_needs_no_step_of_the_worker():
    lines = [
        event(0, "ControllerStarted", size=1, takes_over=False),
        form(0, 1, "w1"),
        times(1, 0, w1=(0, 0, 0, 0, 0, 1, 0)),
    ]
    assert report_of(lines).workers[0].step_s is None
