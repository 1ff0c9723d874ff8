"""Rows per second, from the number of committed steps over time."""

import pytest

from elastic_dp.telemetry.data_rates import DataRate


def rate_of(*reports, rows={0: 8}):  # noqa: B006
    rate = DataRate(rows)
    for at, step in reports:
        rate.reached(float(at), step)
    return rate


def test_rate_is_that_of_the_last_minute_of_reports():
    assert rate_of((10, 5)).rows_per_s is None
    assert rate_of((10, 5), (20, 10)).rows_per_s == 4.0
    assert rate_of((0, 0), (100, 10), (130, 40), (160, 70)).rows_per_s == 8.0
    assert rate_of((10, 5), (20, 15), rows={0: 8, 10: 16}).rows_per_s == 12.0


def test_rate_falls_when_nothing_is_committed_any_more():
    rate = rate_of(*((at, at) for at in range(0, 60, 10)))
    assert rate.rows_per_s == 8.0
    rate.reached(90.0, 50)
    assert rate.rows_per_s == pytest.approx(8 * 20 / 60)


def test_rate_begins_again_when_the_run_goes_back_to_a_checkpoint():
    assert rate_of((10, 50), (20, 60), (40, 25)).rows_per_s is None
    assert rate_of((10, 50), (20, 60), (40, 25), (50, 30)).rows_per_s == 4.0


def test_many_reports_are_remembered_by_the_second():
    rate = rate_of(*((n / 100, n) for n in range(100_000)))
    assert len(rate._points) < 70
    assert rate.rows_per_s == pytest.approx(800, rel=0.01)
