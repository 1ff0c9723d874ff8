"""What the terminal shows of a run."""

import io

from elastic_dp.telemetry.progress import ProgressPrinter

HOUR = 3600.0


def shown(*lines, interval_s=HOUR):
    stream = io.StringIO()
    progress = ProgressPrinter(stream, interval_s)
    for line in lines:
        progress.show(line)
    return [line.partition("] ")[2].split() for line in stream.getvalue().splitlines()]


def test_steps_are_shown_as_a_part_of_those_that_are_expected():
    stream = io.StringIO()
    progress = ProgressPrinter(stream)
    progress.expect(20)
    progress.show({"time": 1.0, "step": 7, "loss": 0.5})
    assert stream.getvalue().endswith("step      7/20  loss 0.5\n")


def test_two_logs_of_one_step_are_both_shown():
    assert shown({"step": 5, "loss": 0.5}, {"step": 5, "eval_loss": 0.25}) == [
        ["step", "5", "loss", "0.5"],
        ["step", "5", "eval_loss", "0.25"],
    ]


def test_a_metric_that_is_logged_rarely_is_shown_among_one_of_each_step():
    every_step = [{"step": n, "loss": 1.0} for n in range(1, 10)]
    lines = shown(*every_step, {"step": 9, "eval_loss": 0.25})
    assert lines == [["step", "1", "loss", "1"], ["step", "9", "eval_loss", "0.25"]]


def test_the_last_values_are_shown_when_the_run_ends():
    logged = [{"step": n, "loss": n / 2} for n in (1, 2, 3)]
    end = [{"command": "FinishRun"}, {"command": "Explain", "text": "finished"}]
    assert shown(*logged, {"step": 3, "lr": 0.5}, {"step": 3, "lr": 0.25}, *end) == [
        ["step", "1", "loss", "0.5"],
        ["step", "3", "lr", "0.5"],
        ["step", "3", "loss", "1.5", "lr", "0.25"],
        ["finished"],
    ]


def test_an_empty_log_shows_nothing():
    assert shown({"step": 1}, {"command": "FinishRun"}) == []


def test_each_step_is_shown_where_there_is_no_limit():
    assert len(shown(*({"step": n, "loss": 0.5} for n in range(9)), interval_s=0.0)) == 9


def test_progress_does_not_call_a_released_worker_gone():
    left = {"event": "WorkerLost", "worker": "w1", "reason": "left, as it was asked to"}
    died = {"event": "WorkerLost", "worker": "w2", "reason": "killed", "cause": "unknown"}
    assert shown(left | {"cause": "released"}, died) == [
        ["w1", "left,", "as", "it", "was", "asked", "to"],
        ["w2", "is", "gone:", "killed"],
    ]
