"""Runs that an earlier commit made are continued, and their journals and checkpoints are read.

README.md says which commit, and how `runs/` was made.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from elastic_dp.cli import app
from elastic_dp.run_record import Result
from elastic_dp.train.exactness.machine_kind import machine_kind
from tests.former_run.job import FORMER_STEPS, train, trainer
from tests.runs import group, lines_of

RUNS = Path(__file__).parent / "runs"
STEPS = 12
NAMES = ("alone", "workers")


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as each worker has, for equal bits
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, list[dict[str, Any]]]:
    """The same job by today's code, without an interruption."""
    folder = tmp_path_factory.mktemp("undisturbed")
    return trainer(str(folder), "alone", STEPS).fit(local=True), metrics(folder / "alone")


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return Path(shutil.copytree(RUNS, tmp_path / "runs"))


def metrics(folder: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in line.items() if k != "time"} for line in lines]


def commits(folder: Path) -> list[Path]:
    return sorted((folder / "checkpoints" / "seals").glob("step-*"))


def is_that_machine() -> bool:
    """Return whether this machine computes the bits of the one that made `runs/`."""
    stored = json.loads(commits(RUNS / "alone")[-1].read_text())
    return machine_kind(torch.device("cpu"), True) in json.dumps(stored)


def must_agree(
    result: Result, logged: list[dict[str, Any]], undisturbed: tuple[Result, list[dict[str, Any]]]
) -> None:
    whole, wanted = undisturbed
    assert result.step == whole.step == STEPS
    assert [one["step"] for one in logged] == list(range(1, STEPS + 1))
    if is_that_machine():
        assert result.weights_sha256 == whole.weights_sha256
        assert logged == wanted
    # On another machine the bias before BatchNorm differs: its gradient is nothing but rounding
    # errors, which AdamW divides by their own size. So the sum of all averaged weights differs, and
    # the loss does not.
    for one, other in zip(logged, wanted, strict=True):
        assert (one["step"], one["averaged"]) == (other["step"], other["averaged"])
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-3)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ended", [True, False], ids=["finished", "interrupted"])
def test_run_of_an_earlier_commit_continues_with_the_digest_of_an_undisturbed_one(
    name, ended, runs, undisturbed
):
    """Interrupted: the last step and the result were not written, so it continues from step 4."""
    if not ended:
        (runs / name / "result.json").unlink()
        commits(runs / name)[-1].unlink()
    result = trainer(str(runs), name, STEPS).fit(local=True)
    logged = metrics(runs / name)
    if not ended:  # the steps behind the checkpoint are made again
        again = logged[FORMER_STEPS:]
        assert [one["step"] for one in again] == list(range(5, STEPS + 1))
        logged = logged[:4] + again
    must_agree(result, logged, undisturbed)


def test_run_of_an_earlier_commit_continues_on_workers(runs, undisturbed):
    spec = trainer(str(runs), "workers", STEPS).spec
    outcome, run = group(spec, train, url=str(runs / "workers"))
    assert outcome.error is None, outcome.traceback
    logged = [x for x in lines_of(run) if "event" not in x and "command" not in x]
    assert [one["step"] for one in logged] == list(range(FORMER_STEPS + 1, STEPS + 1))
    if is_that_machine():
        assert outcome.digest == undisturbed[0].weights_sha256


def asked(*words: str) -> str:
    said = CliRunner().invoke(app, [*words, "--json"])
    assert said.exit_code == 0, said.output
    return said.stdout


def test_journal_of_an_earlier_commit_is_read_by_events_with_todays_names(runs):
    said = asked("events", "workers", "--storage-path", str(runs))
    lines = [json.loads(line) for line in said.splitlines()]
    events = [line for line in lines if "event" in line]
    stopped = [line for line in events if line["event"] == "WorkerStopped"]
    positions = [line["position"] for line in stopped if line["has_state"]]
    assert positions == [[3, 0, 0], [6, 1, 0], [6, 1, 0]]  # one survivor, then both at the end
    assert {line["lineage_id"] for line in stopped if line["has_state"]} == {7}
    assert {"CheckpointCommitted", "WorkerPlaced"} <= {line["event"] for line in events}
    assert not {"place", "whole", "founded", "disagreement", "home"}.intersection(*events)


def test_journal_of_an_earlier_commit_is_read_by_report(runs):
    report = json.loads(asked("report", "workers", "--storage-path", str(runs)))
    assert (report["phase"], report["step"], report["lost"]) == ("finished", FORMER_STEPS, 1)
    kinds = [one["kind"] for one in report["events"]]
    assert {kind: kinds.count(kind) for kind in kinds} == {
        **{"join": 2, "loss": 1, "pause": 2, "checkpoint": 3, "end": 1}
    }
    assert [one["name"] for one in report["workers"]] == ["w1", "w2", "w3"]
    assert [step for _, step, *_ in report["curves"]["loss"]] == list(range(1, FORMER_STEPS + 1))


@pytest.mark.parametrize("name", NAMES)
def test_checkpoints_of_an_earlier_commit_are_listed_verified_and_exported(name, runs, tmp_path):
    url = str(runs / name)
    listed = json.loads(asked("checkpoints", "list", url))
    assert [(one["step"], one["wrong"]) for one in listed] == [(4, []), (6, [])]
    assert listed[-1]["metrics"]["averaged"] == FORMER_STEPS
    assert json.loads(asked("checkpoints", "verify", url)) == {"4": [], "6": []}
    file = tmp_path / "weights.safetensors"
    assert json.loads(asked("checkpoints", "export", url, str(file)))["step"] == FORMER_STEPS
    weights = load_file(file)
    assert len(weights) == 9 and weights["1.num_batches_tracked"] == FORMER_STEPS
