"""Rows per second, from the lines of a journal."""

import pytest

from elastic_dp.telemetry.data_rates import DataRates


def started(rows=8, takes_over=False):
    line = {"time": 0.0, "event": "ControllerStarted", "size": 1, "takes_over": takes_over}
    return line if rows is None else line | {"rows_per_step": rows}


def reported(at, step):
    return {"time": float(at), "event": "TimesReported", "step": step, "times": {}}


def rates_of(*lines):
    rates = DataRates()
    for line in lines:
        rates.line(line)
    return rates


def test_rate_is_that_of_the_last_minute_of_reports():
    assert rates_of(started(), reported(10, 5)).rows_per_s is None
    assert rates_of(started(), reported(10, 5), reported(20, 10)).rows_per_s == 4.0
    slow_then_fast = [reported(at, step) for at, step in ((0, 0), (100, 10), (130, 40), (160, 70))]
    assert rates_of(started(), *slow_then_fast).rows_per_s == 8.0


def test_rate_falls_when_nothing_is_committed_any_more():
    rates = rates_of(started(), *(reported(at, at) for at in range(0, 60, 10)))
    assert rates.rows_per_s == 8.0
    rates.reached(90.0, 50)
    assert rates.rows_per_s == pytest.approx(8 * 20 / 60)


def test_rate_begins_again_when_the_run_goes_back_to_a_checkpoint():
    lines = [started(), reported(10, 50), reported(20, 60)]
    back = {"time": 30.0, "event": "CheckpointFound", "step": 20}
    assert rates_of(*lines, back, reported(40, 25)).rows_per_s is None
    assert rates_of(*lines, reported(40, 25)).rows_per_s is None
    assert rates_of(*lines, back, reported(40, 25), reported(50, 30)).rows_per_s == 4.0


def test_rate_of_a_journal_that_does_not_know_the_rows_of_a_step_is_unknown():
    assert rates_of(started(None), reported(10, 5), reported(20, 10)).rows_per_s is None


def test_many_reports_are_remembered_by_the_second():
    rates = rates_of(started())
    for n in range(100_000):
        rates.reached(n / 100, n)
    assert len(rates._points) < 70
    assert rates.rows_per_s == pytest.approx(800, rel=0.01)


def test_damaged_lines_are_ignored():
    rates = rates_of(started(), reported(10, 5), reported(20, 10))
    rates.line({"event": "TimesReported"})
    rates.line({"time": "x", "event": "ControllerStarted", "takes_over": True, "rows_per_step": []})
    assert rates.rows_per_s == 4.0
