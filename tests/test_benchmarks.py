"""A benchmark that misses a target says which, and ends with 1."""

import inspect
import json
import subprocess
import sys
import time
import types

import pytest

from benchmarks import (
    gpu_check,
    gpu_checks,
    gpu_step,
    join,
    picture,
    recovery,
    report,
    results_page,
    step_overhead,
)
from benchmarks.models import RandomTokens
from elastic_dp.train.step.batch_source import BatchSource

# What its results become, and the target that is missed then.
SPOILT = {
    recovery: (
        lambda found: found["3 workers"]["pause"].update(median_ms=95.0),
        "3 workers: half the median pause of tuned torchft",
    ),
    join: (
        lambda found: found["with a standby"].update(exact=False),
        "with a standby: the weights of the undisturbed run",
    ),
    step_overhead: (
        lambda found: found[2].update(interval=[1.04, 1.06]),
        "0.9M exact, 1 virtual worker each: 1.03 of DDP's time",
    ),
    picture: (
        lambda found: found["with kills"].update(loss=2.070057928562165),
        "the loss and the weights of the undisturbed run",
    ),
}


@pytest.mark.parametrize("benchmark", SPOILT, ids=lambda module: module.__name__)
def test_a_target_that_is_missed_is_named(benchmark, capsys):
    """In the results that are kept, which may miss others."""
    spoil, target = SPOILT[benchmark]
    name = benchmark.__name__.rpartition(".")[2]
    results = json.loads((report.RESULTS / f"{name}.json").read_text())["results"]
    before = benchmark.targets(results)
    assert target in before
    spoil(results)
    assert report.exit_code(benchmark.targets(results)) == 1
    assert f"missed: {target}\n" in capsys.readouterr().out
    assert report.exit_code(dict.fromkeys(before, True)) == 0


@pytest.mark.parametrize("peer", [None, "not measured: no module named torchft", {"pause": {}}])
def test_recovery_without_torchft_is_compared_with_its_recorded_time(peer):
    results = json.loads((report.RESULTS / "recovery.json").read_text())["results"]
    results |= {recovery.TORCHFT: peer}
    target = "3 workers: half the median pause of tuned torchft"
    for median_ms, met in ((recovery.TORCHFT_MS / 2, True), (recovery.TORCHFT_MS / 2 + 1, False)):
        results["3 workers"]["pause"].update(median_ms=median_ms)
        assert recovery.targets(results)[target] is met


def test_the_made_up_data_of_the_step_benchmark_is_called_as_training_calls_its_data():
    methods = [n for n, m in inspect.getmembers(BatchSource, inspect.isfunction) if n[0] != "_"]
    assert len(methods) >= 8
    for name in methods:
        wanted = inspect.signature(getattr(BatchSource, name)).parameters
        assert list(inspect.signature(getattr(RandomTokens, name)).parameters) == list(wanted), name


def test_gpu_check_on_the_cpu_prints_a_line_a_check_and_writes_all(tmp_path, capsys):
    output = tmp_path / "check.json"
    arguments = ["--device", "cpu", "--small", "--output", str(output)]
    assert gpu_check.main([*arguments, "--only", "snapshot"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [
        ["ok", "environment"],
        ["ok", "snapshot"],
    ]
    found = json.loads(output.read_text())["results"]
    assert found["device"] == "cpu" and found["small"] is True
    assert found["checks"]["snapshot"]["facts"]["host_memory_ratio"] < 1.5


@pytest.mark.parametrize("name", ["communicators", "faults"])
def test_gpu_check_on_the_cpu_passes(name, tmp_path):
    """In this process; the others, and each in its own, in the test after this one."""
    setup = gpu_checks.Setup("cpu", small=True, folder=tmp_path)
    assert gpu_checks.CHECKS[name].run(setup)


@pytest.mark.slow
def test_gpu_check_on_the_cpu_passes_all_checks(tmp_path):
    output = tmp_path / "check.json"
    assert gpu_check.main(["--device", "cpu", "--small", "--output", str(output)]) == 0
    found = json.loads(output.read_text())["results"]["checks"]
    assert {name: one["status"] for name, one in found.items()} == dict.fromkeys(
        gpu_checks.CHECKS, "ok"
    )


@pytest.mark.parametrize(
    ("end", "status"), [("time.sleep(60)", "timeout"), ("os.abort()", "failed")]
)
def test_gpu_check_that_ends_early_leaves_what_it_found_and_where_it_stood(
    end, status, monkeypatch
):
    def command(name, device, small, result):
        notes = str(result.parent / gpu_checks.NOTES)
        note = f'pathlib.Path({notes!r}).write_text(\'{{"first_s": 1}}\\n{{"seco\')'
        return [sys.executable, "-c", f"import os, pathlib, time; {note}; {end}"]

    monkeypatch.setattr(gpu_check, "command_of", command)
    found = gpu_check.run_apart("abort", "cpu", True, 3.0)
    assert (found["status"], found["facts"]) == (status, {"first_s": 1})
    assert "Fatal Python error: Aborted" in found["output"]
    assert "(first_s 1)" in gpu_check.line("abort", found)


def test_cases_of_a_step_that_are_not_measured_are_named_and_end_no_other(tmp_path, monkeypatch):
    def run(command, **_):
        case = command[command.index("--case") + 1]
        found = json.dumps({"case": case, "ms": 30.0, "gb": 1.0})
        return subprocess.CompletedProcess(command, int("plain" in case), found, "no memory")

    monkeypatch.setattr(gpu_step.subprocess, "run", run)
    in_time = list(gpu_step.measure_all(small=True, limit_s=60.0))
    assert [one.get("why") for one in in_time] == ["no memory", None, None]
    too_late = list(gpu_step.measure_all(small=True, limit_s=0.0))
    assert [one["why"] for one in too_late] == ["out of time"] * 3

    facts = {one["case"]: one for one in [too_late[0], *in_time[1:]]}
    gpu = {"gpu": "H1", "torch": "2.13.0"}
    checks = {"step": {"status": "ok", "facts": facts}}
    (tmp_path / "gpu").mkdir()
    for date in ("2026-11-28", "2026-11-29"):
        run = {"date": date, "hardware": gpu, "results": {"checks": checks}}
        (tmp_path / "gpu" / f"{date}-h1.json").write_text(json.dumps(run))
    monkeypatch.setattr(results_page, "RESULTS", tmp_path)
    page = "\n".join(results_page.gpu_runs())
    assert "2026-11-29" in page and "2026-11-28" not in page
    assert "| 124M plain | not measured |" in page and "| 124M fast | 30.0 ms |" in page


@pytest.mark.parametrize(("why", "fails"), [("out of time", False), ("no memory", True)])
def test_check_of_the_step_fails_by_a_case_that_fails(why, fails, tmp_path, monkeypatch):
    cases = [{"case": "124M plain", "ms": 30.0}, {"case": "124M fast", "why": why}]
    monkeypatch.setattr(gpu_step, "measure_all", lambda **_: iter([dict(one) for one in cases]))
    setup = gpu_checks.Setup("cpu", small=True, folder=tmp_path)
    if not fails:
        assert gpu_checks.step(setup)["124M fast"] == {"why": why}
        return
    with pytest.raises(gpu_checks.Wrong, match="'124M fast': 'no memory'"):
        gpu_checks.step(setup)


def test_gpu_check_gives_no_check_more_time_than_is_left(tmp_path, monkeypatch, capsys):
    now, limits = [0.0], {}

    def run(name, device, small, limit_s):
        now[0] += limit_s
        limits[name] = limit_s
        return {"status": "ok", "facts": {}, "seconds": limit_s}

    monkeypatch.setattr(gpu_check, "run_apart", run)
    clock = types.SimpleNamespace(**vars(time) | {"monotonic": lambda: now[0]})
    monkeypatch.setattr(gpu_check, "time", clock)
    found = gpu_check.run_all(None, "cpu", True, tmp_path / "check.json")
    assert sum(limits.values()) <= gpu_check.TOTAL_S <= 8 * 60
    late = {name: one["why"] for name, one in found.items() if name not in limits}
    assert late == dict.fromkeys([*gpu_checks.CHECKS][len(limits) :], "out of time")
