"""The kernel of attention of an exact run on a GPU."""

from functools import partial

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from elastic_dp.data import open_data
from elastic_dp.device.gpu import _ATTENTION
from elastic_dp.train.exactness.machine_kind import deterministic_kernels
from elastic_dp.train.local_run import LocalRun
from tests.device import fake_gpu
from tests.runs import spec_of
from tests.train.jobs import adamw, classifier, cross_entropy

GPU, CPU = fake_gpu.GPU, torch.device("cpu")


def enabled():
    return {name for name in _ATTENTION if getattr(torch.backends.cuda, f"{name}_sdp_enabled")()}


@pytest.fixture(autouse=True)
def _value_of_the_user(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")  # else a product would need a GPU


@pytest.mark.parametrize(
    ("exact", "device", "kernels"),
    [(True, GPU, {"math"}), (False, GPU, {*_ATTENTION}), (True, CPU, {*_ATTENTION})],
)
def test_exact_run_on_a_gpu_attends_by_the_kernel_that_is_deterministic(exact, device, kernels):
    before = enabled()
    with deterministic_kernels(exact, [], device):
        assert enabled() == kernels
    assert enabled() == before == {*_ATTENTION}


def test_what_the_user_chooses_wins():
    with deterministic_kernels(True, [], GPU), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        assert enabled() == {"flash"}
    kernels = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(kernels), deterministic_kernels(True, [], GPU):
        assert enabled() == {"mem_efficient", "math"}


@pytest.mark.parametrize(
    ("device", "exact", "times"), [(GPU, True, 1), (GPU, False, 0), (CPU, True, 0)]
)
def test_exact_run_says_once_how_it_attends_and_what_that_costs(device, exact, times, monkeypatch):
    said = []

    def train(ctx):
        with ctx.device:
            model = classifier()
        for _ in ctx.steps(model, adamw(model), cross_entropy):
            pass

    spec = spec_of(steps=2, exact=exact)
    fake_gpu.install(partial(monkeypatch.setattr, raising=False))
    with fake_gpu.modes():
        data = open_data(spec.data, virtual_workers=spec.scaling.virtual_workers)
        LocalRun(spec, data, device, on_say=said.append).run(train)
    assert sum("math kernel" in text and "slower" in text for text in said) == times
