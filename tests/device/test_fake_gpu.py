"""Runs on a fake GPU: no operation mixes the devices, and the bits are those of the processor."""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import gpu_checks
from elastic_dp.data import open_data
from elastic_dp.train.local_run import LocalRun
from tests.device import fake_gpu

ROOT = Path(__file__).parents[2]


def digest_of(folder, device, steps, url=None, **how):
    """That of a run with checkpoints, which goes on from one that is there."""
    setup = gpu_checks.Setup("cpu", True, folder)
    spec = gpu_checks.job(setup, steps=steps, every_steps=2, **how)
    virtual_workers = gpu_checks.VIRTUAL_WORKERS * (spec.inner_steps or 1)
    data = open_data(spec.data, virtual_workers=virtual_workers)
    run = LocalRun(spec, data, device, url=url or str(folder / device.type))
    with sdpa_kernel(SDPBackend.MATH):  # an exact run on a GPU chooses it
        run.run(gpu_checks.train)
    return run.digest


def digests(folder, device, model, precision, **how):
    """Yield the digest of a run with checkpoints, and that of one that goes on from there."""
    for steps in (4, 6):
        yield digest_of(folder, device, steps, model=model, precision=precision, **how)


@pytest.mark.parametrize(
    ("model", "precision", "how"),
    [
        ("conv", None, {}),
        ("conv", None, {"inner_steps": 2}),
        ("conv", None, {"staleness": 1}),
        ("conv", None, {"sharding": "optimizer"}),
        pytest.param("gpt", "bf16", {}, marks=pytest.mark.slow),
        pytest.param("gpt", "bf16", {"inner_steps": 2}, marks=pytest.mark.slow),
        pytest.param("gpt", "bf16", {"staleness": 1}, marks=pytest.mark.slow),
        pytest.param("gpt", "bf16", {"sharding": "optimizer"}, marks=pytest.mark.slow),
        pytest.param("gpt", None, {}, marks=pytest.mark.slow),
        pytest.param("conv", "fp16", {}, marks=pytest.mark.slow),
    ],
)
def test_run_on_a_fake_gpu_mixes_no_devices_and_has_the_digest_of_the_host(
    model, precision, how, tmp_path, monkeypatch
):
    on_host = list(digests(tmp_path, torch.device("cpu"), model, precision, **how))
    fake_gpu.install(partial(monkeypatch.setattr, raising=False))
    with fake_gpu.modes():
        assert list(digests(tmp_path, fake_gpu.GPU, model, precision, **how)) == on_host


GPU, HOST = fake_gpu.GPU, torch.device("cpu")


@pytest.mark.parametrize(
    ("first", "then", "how"),
    [
        ((GPU, None), (GPU, "optimizer"), {}),
        ((HOST, None), (GPU, None), {}),
        pytest.param((GPU, "optimizer"), (GPU, None), {}, marks=pytest.mark.slow),
        pytest.param((HOST, "optimizer"), (GPU, "optimizer"), {}, marks=pytest.mark.slow),
        pytest.param((HOST, None), (GPU, "optimizer"), {}, marks=pytest.mark.slow),
        pytest.param((HOST, None), (GPU, None), {"staleness": 1}, marks=pytest.mark.slow),
        pytest.param(
            (HOST, None), (GPU, None), {"model": "gpt", "precision": "bf16"}, marks=pytest.mark.slow
        ),
        pytest.param((GPU, None), (HOST, None), {}, marks=pytest.mark.slow),
    ],
)
def test_state_is_restored_to_another_device_with_and_without_sharding(
    first, then, how, tmp_path, monkeypatch
):
    how = {"model": "conv"} | how
    on_host = digest_of(tmp_path / "undisturbed", HOST, 6, **how)
    fake_gpu.install(partial(monkeypatch.setattr, raising=False))
    with fake_gpu.modes():
        for (device, sharding), steps in ((first, 4), (then, 6)):
            url = str(tmp_path / "run")
            digest = digest_of(tmp_path, device, steps, url=url, sharding=sharding, **how)
    assert digest == on_host
