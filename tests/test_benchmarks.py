"""A benchmark that misses a target says which, and ends with 1."""

import inspect
import json
import sys
import types

import pytest
import torch

from benchmarks import (
    gpu_check,
    gpu_checks,
    join,
    picture,
    recovery,
    report,
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


def test_quick_form_of_pairs_writes_and_judges_nothing(monkeypatch, capsys):
    monkeypatch.setattr(report, "write", lambda *_: "written")
    monkeypatch.setattr(step_overhead, "measure", lambda *case: {"case": case})
    monkeypatch.setattr(step_overhead, "prepare_environment", lambda *_: None)
    monkeypatch.setattr(step_overhead, "targets", lambda results: {"all": len(results) > 4})
    assert step_overhead.main(["--quick"]) == 0
    said = capsys.readouterr().out
    assert said.count("'0.9M'") == 4 and "written" not in said and "missed" not in said
    assert step_overhead.main(["--sizes", "0.9M"]) == 1
    said = capsys.readouterr().out
    assert said.endswith("written\nmissed: all\n")
    assert step_overhead.main(["--no-write"]) == 0
    assert "written" not in capsys.readouterr().out


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


@pytest.fixture
def _attention_as_before():
    kernels = ("flash", "mem_efficient", "math", "cudnn")
    before = {k: getattr(torch.backends.cuda, f"{k}_sdp_enabled")() for k in kernels}
    yield
    for kernel, enabled in before.items():
        getattr(torch.backends.cuda, f"enable_{kernel}_sdp")(enabled)


@pytest.mark.parametrize(
    "name",
    [
        "communicators",
        "exact-gpt-fp32",
        "attention-fp16",
        "faults",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("step", "exact-conv-bf16", "changes")
        ),
    ],
)
@pytest.mark.usefixtures("_attention_as_before")
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


def test_gpu_check_ends_a_check_that_hangs_and_one_that_dies_is_failed():
    assert gpu_check.run_apart("snapshot", "cpu", True, 0.05)["status"] == "timeout"
    died = gpu_check.run_apart("no such check", "cpu", True, 60.0)
    assert died["status"] == "failed" and "KeyError" in died["output"]


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


def test_gpu_check_keeps_what_a_check_has_noted(tmp_path):
    setup = gpu_checks.Setup("cpu", True, tmp_path)
    assert gpu_check.noted(tmp_path) == {}
    assert setup.note(first_s=1.5) == {"first_s": 1.5}
    setup.note(second_s=2)
    assert gpu_check.noted(tmp_path) == {"first_s": 1.5, "second_s": 2}


@pytest.mark.parametrize(
    ("environment", "device"),
    [
        ({"status": "ok", "facts": {"gpu": None}}, "cpu"),
        ({"status": "ok", "facts": {"gpu": "H100"}}, "cuda"),
        ({"status": "timeout", "facts": {}}, "cuda"),
        ({"status": "failed", "facts": {"gpu": "H100"}}, "cuda"),
    ],
)
def test_gpu_check_tests_the_cpu_only_where_no_gpu_is_found(environment, device):
    assert gpu_check.device_of(environment) == device


def test_gpu_check_has_a_limit_for_each_check():
    assert gpu_check.TOTAL_S < 480
    assert all(0 < check.limit_s <= 150 for check in gpu_checks.CHECKS.values())


def finding(monkeypatch, digests, because):
    """Runs that end with these digests, one after another, and all of them for this reason
    inexact."""
    ends = iter(digests)

    def group(spec, *_):
        return types.SimpleNamespace(digest=next(ends), inexact_because=because), []

    monkeypatch.setattr(gpu_checks, "group", group)


FLASH = ("_scaled_dot_product_flash_attention_backward does not have a deterministic",)


@pytest.mark.parametrize(
    ("digests", "because", "fact"),
    [("aa", (), True), ("aa", FLASH, True), ("ab", FLASH, False)],
)
def test_gpu_check_of_attention_reports_what_torchs_own_kernel_does(
    digests, because, fact, monkeypatch, tmp_path
):
    """On a healthy GPU it may say that it is not deterministic."""
    finding(monkeypatch, digests, because)
    check = gpu_checks.CHECKS["attention-bf16"]
    facts = check.run(gpu_checks.Setup("cpu", small=True, folder=tmp_path))
    assert facts == {"equal": fact, "inexact_because": sorted(because)}


def test_gpu_check_of_attention_with_bits_that_differ_for_no_reason_fails(monkeypatch, tmp_path):
    finding(monkeypatch, "ab", ())
    with pytest.raises(gpu_checks.Wrong, match="no run says why"):
        gpu_checks.attention(gpu_checks.Setup("cpu", True, tmp_path), precision=None)


@pytest.mark.parametrize(("digests", "because"), [("aa", FLASH), ("ab", ())])
def test_gpu_check_of_exactness_with_other_bits_or_an_inexact_run_fails(
    digests, because, monkeypatch, tmp_path
):
    finding(monkeypatch, digests, because)
    with pytest.raises(gpu_checks.Wrong):
        gpu_checks.CHECKS["exact-gpt-bf16"].run(gpu_checks.Setup("cpu", True, tmp_path))


@pytest.mark.usefixtures("_attention_as_before")
def test_gpu_check_model_that_must_be_exact_uses_the_math_kernel_alone():
    gpu_checks.build("gpt-fused", 32)
    assert torch.backends.cuda.flash_sdp_enabled()
    gpu_checks.build("gpt", 32)
    enabled = [
        kernel
        for kernel in ("flash", "mem_efficient", "math", "cudnn")
        if getattr(torch.backends.cuda, f"{kernel}_sdp_enabled")()
    ]
    assert enabled == ["math"]


def test_gpu_check_of_overhead_fails_unless_the_host_waits_once_in_each_step():
    def warned(*lines):
        said = [("called a synchronizing CUDA operation", n) if n else ("aside", 1) for n in lines]
        return [types.SimpleNamespace(message=m, filename="f.py", lineno=n) for m, n in said]

    waits = gpu_checks.waits_for_the_device(warned(7, 3, 0, 3, 3), [0, 2, 4, 5, 5])
    assert waits == [["f.py:7", "f.py:3"], ["f.py:3"], ["f.py:3"], []]
    gpu_checks.check_waits(waits[1:3])
    with pytest.raises(gpu_checks.Wrong, match=r"2 times .*f.py:7', 'f.py:3"):
        gpu_checks.check_waits(waits)
    with pytest.raises(gpu_checks.Wrong, match="0 times"):
        gpu_checks.check_waits(waits[1:])
