"""Each habit of training code is exact, refused or said, as docs/habits.md has it: on one worker
and on three, with a join, a kill, and a restore.

    python -m tests.train.test_habits    # prints the table of the page
"""

import dataclasses
from pathlib import Path

import pytest

from elastic_dp.cluster.run_handle import error_of
from elastic_dp.config import CheckpointConfig, MapStyleData
from elastic_dp.train.fault_injection import WorkerFault
from tests.patience import eventually
from tests.runs import group, local, never_put_off, resize, scaled, spec_of, texts_of
from tests.train.checkpointing.test_worker_checkpointer import kill_all, times_lost, when_committed
from tests.train.habits import HABITS, autocast_loss
from tests.train.habits import run as run_without_habits

PAGE = Path(__file__).parents[2] / "docs" / "habits.md"
STEPS = 20


def job(habit, workers, **config):
    # Three workers get three, three and two of the eight: pairs that one worker runs are split.
    given = {"config": config, "checkpoint": CheckpointConfig(every_steps=4)}
    if habit.rows is not None:
        given["data"] = MapStyleData(habit.rows, micro_batch_size=4)
    return spec_of(steps=STEPS, workers=workers, min_workers=1, virtual=8, **given)


def alone(habit):
    """On one worker, undisturbed: the run, its session, and what it said."""
    heard = []
    run = local(job(habit, 1), habit.train, on_say=heard.append)
    return run, run._session, heard


def disturbed(habit, folder):
    """One worker, then three, of which one dies in their first step; then all die, and the newest
    checkpoint is restored."""
    url, gate, once = folder / "run", folder / "gate", folder / "killed"
    spec = job(habit, 1, hold=dict.fromkeys(range(1, 16), 3), gates={18: str(gate)})
    script = [
        resize(1, 3),
        (1, lambda run: eventually(lambda: once.exists() or run.controller.ended.is_set())),
        (1, when_committed(url, 16, kill_all)),
        (1, lambda run: gate.touch()),
    ]
    dies = WorkerFault("backward", rank=1, world_size=3, once=str(once))
    train = never_put_off(habit.train)
    outcome, run = group(spec, train, faults=(dies,), script=script, url=str(url))
    assert once.exists() and times_lost(run) == 1 and outcome.step == STEPS
    return outcome, run


# The others are disturbed with `make slow`.
DISTURBED_IN_CI = frozenset(
    """gradient_penalty manual_seed carried_counter experts writes_in_the_body
    teacher_not_passed""".split()  # noqa: SIM905
)


def all_of(outcome):
    return [name for name, habit in HABITS.items() if habit.outcome == outcome]


def disturbed_of(outcome):
    return [
        pytest.param(name, marks=() if name in DISTURBED_IN_CI else pytest.mark.slow)
        for name in all_of(outcome)
    ]


def test_habits_disturbed_in_ci_are_habits():
    assert set(HABITS) >= DISTURBED_IN_CI


@pytest.mark.parametrize("name", disturbed_of("exact"))
def test_exact_habit_gives_one_digest_for_any_number_of_workers_without_a_warning(name, tmp_path):
    habit = HABITS[name]
    undisturbed, session, heard = alone(habit)
    outcome, run = disturbed(habit, tmp_path)
    assert outcome.digest == undisturbed.digest
    assert texts_of(run)
    assert not [text for text in [*heard, *texts_of(run)] if "WARNING" in text]
    assert not session.inexact_because and not outcome.inexact_because


@pytest.mark.parametrize("name", ["zero_grad", "zero_grad_in_the_body"])
def test_zero_grad_loses_no_gradient(name):
    without = dataclasses.replace(HABITS[name], train=run_without_habits)
    assert alone(HABITS[name])[0].digest == alone(without)[0].digest


def test_autocast_around_the_loop_is_as_good_as_in_the_loss():
    habit = HABITS["autocast_around_the_loop"]
    within = dataclasses.replace(habit, train=lambda ctx: run_without_habits(ctx, autocast_loss))
    assert alone(habit)[0].digest == alone(within)[0].digest


def check_said(habit, texts):
    assert any("WARNING" in text and habit.words in text for text in texts), texts


@pytest.mark.parametrize("name", all_of("said"))
def test_said_habit_is_named_for_one_worker(name):
    check_said(HABITS[name], alone(HABITS[name])[2])


@pytest.mark.parametrize("name", disturbed_of("said"))
def test_said_habit_is_named_for_any_number_of_workers(name, tmp_path):
    check_said(HABITS[name], texts_of(disturbed(HABITS[name], tmp_path)[1]))


@pytest.mark.parametrize("name", all_of("refused"))
def test_refused_habit_is_one_typed_error_for_one_worker(name):
    habit = HABITS[name]
    with pytest.raises(habit.error) as refused:
        alone(habit)
    assert type(refused.value) is habit.error and habit.words in str(refused.value), refused.value


@pytest.mark.parametrize("name", disturbed_of("refused"))
def test_refused_habit_is_one_typed_error_for_any_number_of_workers(name):
    habit = HABITS[name]
    outcome, _ = group(scaled(job(habit, 3), min_workers=3), habit.train, fails=True)
    error = error_of(outcome)
    assert type(error) is habit.error and habit.words in str(error), outcome.traceback


def table():
    rows = ["| what the code does | what comes of it | |", "|---|---|---|"]
    for habit in HABITS.values():
        error = f"`{habit.error.__name__}`: " if habit.error else ""
        words = habit.words.removeprefix("the body of the loop over ctx.steps ")
        detail = error + (f"“… {words} …”" if words else habit.note)
        detail = detail.replace("[", r"\[")  # two pairs in a row would be a link
        rows.append(f"| {habit.what} | {habit.outcome} | {detail} |")
    return "\n".join(rows)


def test_page_of_habits_has_the_rows_that_are_tried_here():
    assert table() in PAGE.read_text(encoding="utf-8")


if __name__ == "__main__":
    print(table())
