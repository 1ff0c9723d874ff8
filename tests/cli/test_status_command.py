"""`status`: aligned tables of recorded folders."""

import contextlib
import json
import math
import re

import pytest
from typer.testing import CliRunner

import elastic_dp as edp
from elastic_dp.checkpoint.catalog import Catalog
from elastic_dp.cli import app
from elastic_dp.cli.run_tables import run_text
from elastic_dp.errors import LoopError, StorageError
from elastic_dp.report.report_reader import RunFolder
from elastic_dp.report.run_status import Health, health_of
from elastic_dp.run_record import Result, RunLimits, write_result
from elastic_dp.storage import Store
from tests.checkpoint.states import save, train_state
from tests.cli.recorded import recorded, runs_after_a_night
from tests.runs import Points
from tests.train.jobs import adamw, classifier, cross_entropy

ESCAPE = "\x1b"
HEADER = ["run", "health", "step", "loss", "workers", "goodput", "saved", "age", "last event"]
LIVE = {
    "phase": "running",
    "reason": "generation 3: 2 workers",
    "generation": 3,
    "world_size": 2,
    "size": 2,
    "step": 5,
    "max_steps": 10,
    "metrics": {"loss": 0.5},
    "goodput": 0.9,
    "led_s": 10.0,
    "waits_for": "",
    "failed": False,
    "newest_event": {"text": "w3 is gone", "age_s": 3.0},
    "newest_checkpoint": {"step": 4, "age_s": 60.0},
}


@pytest.fixture
def runs(tmp_path):
    return runs_after_a_night(tmp_path)


def asked(*words, charset="utf-8", code=0):
    """What is printed."""
    runner = CliRunner(charset=charset, env={"COLUMNS": "80"})
    said = runner.invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert said.exit_code == code, said.output
    return said.stdout


def cells(line):
    return re.split(r"\s{2,}", line.strip())


def test_list_of_a_storage_path_is_an_aligned_table(runs):
    text = asked("status", "--storage-path", runs)
    header, *lines = text.splitlines()
    assert ESCAPE not in text and header.split("  ")[0] == "run" and cells(header) == HEADER
    rows = {cells(line)[0]: cells(line) for line in lines}
    assert [*rows] == ["broken", "going", "night"]
    assert rows["going"][1:5] == ["needs a look", "4/20", "1", "2/3"]
    assert rows["night"][1:5] == ["finished", "6/6", "1", "-"]
    assert rows["night"][-1] == "finished after step 6: enough"
    assert rows["broken"][1] == "failed" and "KeyError: 'x' [31mred" in rows["broken"][-1]
    places = {name: header.index(name) for name in HEADER}
    for line in lines:  # each cell begins below its header, however narrow the terminal was
        assert all(line[place - 1] == " " for place in places.values() if place)


def test_list_prints_json_with_the_health_of_each_run(runs):
    rows = {
        row["name"]: row for row in json.loads(asked("status", "--json", "--storage-path", runs))
    }
    going = rows["going"]
    assert (going["health"], going["health_reason"]) == ("needs a look", "2 of 3 workers train")
    assert [going[x] for x in ("step", "max_steps", "world_size", "size")] == [4, 20, 2, 3]
    checkpoint = going["newest_checkpoint"]
    assert checkpoint["step"] == 4 and 0 <= checkpoint["age_s"] < 600
    assert going["phase"] == "unfinished" and going["workers"] == {
        "w1": "training",
        "w3": "training",
    }  # as `Run.status` names them
    assert rows["night"]["phase"] == "over" and rows["night"]["goodput"] > 0


def test_list_shows_the_other_runs_where_one_cannot_be_read(runs, monkeypatch):
    read = RunFolder.report

    def report(folder, now):
        if folder._name == "night":
            raise StorageError("the store is away")
        return read(folder, now)

    monkeypatch.setattr(RunFolder, "report", report)
    text = asked("status", "--storage-path", runs)
    (line,) = [line for line in text.splitlines() if line.startswith("night")]
    assert "unknown" in line and "the store is away" in line and "going" in text


def test_list_as_json_says_of_which_run_a_file_is_damaged(runs):
    (runs / "night" / "result.json").write_text("[]")
    rows = json.loads(asked("status", "--json", "--storage-path", runs))
    night = rows[-1]
    assert (len(rows), night["name"], night["phase"]) == (3, "night", "unknown")
    assert "result.json" in night["reason"] and night["health"] == "unknown"


def test_list_of_an_empty_storage_path_says_so(tmp_path):
    assert asked("status", "--storage-path", tmp_path) == "no runs here\n"


def test_run_that_was_trained_in_one_process_has_no_generation_and_no_logs(tmp_path):
    lines = [
        {
            "time": 100.0 + step,
            "command": "Explain",
            "text": f"checkpoint of step {step} is committed",
        }
        for step in range(1, 4)
    ]
    recorded(tmp_path, "alone", lines, total=3)
    write_result(str(tmp_path / "alone"), Result("alone", "x", 3, "done", "0", True), RunLimits())
    there = ("alone", "--storage-path", tmp_path)
    assert "generation" not in asked("status", *there)
    assert asked("logs", *there) == ""
    said = CliRunner().invoke(app, ["logs", *map(str, there)])
    assert "no worker of alone has printed anything that is kept" in said.stderr


def fit_here(train, name, folder, **options):
    """Four steps in this process."""
    data = edp.MapStyleData(Points(), micro_batch_size=4)
    options |= {"name": name, "storage_path": folder, "data": data, "max_steps": 4}
    edp.ElasticTrainer(train, **options).fit(local=True)


def test_texts_of_a_run_are_printed_without_control_characters(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def train(ctx):
        model = classifier()
        for step in ctx.steps(model, adamw(model), cross_entropy):
            ctx.log({"\x1b[31mred": 1.0})
            if step.number == 2:
                raise ValueError("\x1b[2Jgone")

    with pytest.raises(ValueError, match="gone"):
        fit_here(train, "red", tmp_path, checkpoint=edp.CheckpointConfig(every_steps=1))
    for verb in ("status", "report", "checkpoints list", "logs --events", "stop"):
        said = CliRunner().invoke(app, [*verb.split(), "red", "--storage-path", str(tmp_path)])
        words = "[2Jgone" if verb != "checkpoints list" else "[31mred"
        assert words in said.output and "\x1b" not in said.output, verb


@pytest.mark.filterwarnings("ignore:since the last start of this run")
def test_run_in_one_process_says_how_it_ended_until_it_is_started_again(tmp_path):
    raised = [ValueError("a mistake in my loop"), SystemExit(2), KeyboardInterrupt(), None]

    def train(ctx):
        model = classifier()
        for step in ctx.steps(model, adamw(model), cross_entropy):
            if raised[0] and step.number == 2:
                raise raised[0]

    said = []
    while raised:
        with contextlib.suppress(ValueError, LoopError, KeyboardInterrupt):
            fit_here(train, "boom", tmp_path)
        lines = asked("status", "boom", "--storage-path", tmp_path).splitlines()
        said.append([lines[0], *cells(lines[1])[1:2]])
        raised.pop(0)
    assert said == [
        ["boom: failed: ValueError: a mistake in my loop", "2/4"],
        [
            "boom: failed: LoopError: the train function asked to exit with 2. To end the run "
            "early on all workers, call ctx.stop(reason)",
            "2/4",
        ],
        ["boom: finished: interrupted", "2/4"],
        ["boom: finished: the last step", "4/4"],
    ]


def test_status_shows_the_health_first_and_then_what_is_known(runs):
    lines = asked("status", "going", "--storage-path", runs).splitlines()
    assert lines[0] == "going: needs a look: 2 of 3 workers train"
    facts = dict(cells(line)[:2] for line in lines[1:] if line.startswith("  "))
    assert facts["step"] == "4/20" and facts["loss"] == "1" and facts["metrics"] == "lr 0.1"
    assert facts["workers"] == "2/3" and facts["generation"] == "3" and facts["lost"] == "1 worker"
    assert facts["checkpoint"] == "step 4" and facts["saved"] and facts["age"]
    assert facts["last event"] == "generation 2 ends: 1 worker joins"
    table = lines[lines.index("") + 1 :]
    assert cells(table[0]) == ["worker", "stage", "pid", "node"]
    assert [cells(line) for line in table[1:]] == [
        ["w1", "training", "-", "node-1"],
        ["w3", "training", "-", "-"],
    ]


def test_status_of_an_ended_run_says_how_it_ended(runs):
    text = asked("status", "night", "--storage-path", runs)
    assert text.startswith("night: finished: enough\n") and "worker  " not in text
    assert asked("status", "broken", "--storage-path", runs).startswith("broken: failed: w1 raised")


@pytest.mark.parametrize("verb", [["status"], ["status", "höhe"]])
def test_terminal_that_is_not_of_utf_8_gets_question_marks_and_no_error(tmp_path, verb):
    runs = runs_after_a_night(tmp_path)
    (runs / "going").rename(runs / "höhe")
    text = asked(*verb, "--storage-path", runs, charset="ascii")
    assert "h?he" in text


def test_checkpoints_are_found_by_the_name_of_the_run_and_its_storage_path(tmp_path, monkeypatch):
    runs = runs_after_a_night(tmp_path)
    save(Catalog(Store(str(runs / "night"))), train_state(1), 6)
    by_name = asked("checkpoints", "list", "night", "--storage-path", runs)
    assert by_name == asked("checkpoints", "list", runs / "night") and "6" in by_name
    said = CliRunner().invoke(app, ["checkpoints", "list", "nigth", "--storage-path", str(runs)])
    assert said.exit_code == 2 and "Did you mean 'night'?" in said.stderr
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "elastic_dp_runs").symlink_to(runs)
    assert asked("checkpoints", "list", "night") == by_name
    assert CliRunner().invoke(app, ["checkpoints", "list", "nobody"]).exit_code == 2


# ---------------------------------------------------------------------------------- live runs


@pytest.mark.parametrize(
    ("changes", "health", "reason"),
    [
        ({}, Health.HEALTHY, "2 of 2 workers train"),
        ({"generation": 0, "waits_for": "none has room"}, Health.STARTING, "none has room"),
        ({"size": 3}, Health.CONCERN, "2 of 3 workers train"),
        (
            {"size": 8, "size_limit": 2},
            Health.HEALTHY,
            "2 of 2 workers train, 8 wanted: runs of higher priority come first",
        ),
        ({"metrics": {"loss": math.nan}}, Health.CONCERN, "its loss is not finite"),
        ({"goodput": 0.2, "led_s": 5.0}, Health.HEALTHY, "2 of 2 workers train"),
        ({"goodput": 0.2, "led_s": 5e3}, Health.CONCERN, "its goodput is 20 %"),
        ({"failures": 3}, Health.HEALTHY, "2 of 2 workers train"),
        ({"failures": 4}, Health.CONCERN, "4 failures without a step in between"),
        ({"phase": "over"}, Health.FINISHED, "generation 3: 2 workers"),
        ({"phase": "over", "failed": True}, Health.FAILED, "generation 3: 2 workers"),
    ],
)
def test_health_of_a_live_run_is_what_its_controller_says(changes, health, reason):
    assert health_of(LIVE | changes) == (health, reason)


def test_overview_of_a_controller_that_does_not_answer_is_unknown():
    unknown = {"phase": "unknown", "reason": "no answer"}
    assert health_of(unknown) == (Health.UNKNOWN, "no answer")
    named = {"name": "job", "health": "unknown", "health_reason": ""}
    assert "  last event  no answer" in run_text(unknown | named)
