"""When `CUBLAS_WORKSPACE_CONFIG` is set: torch up to 2.12 parses it in each matrix product."""

import os
from functools import partial

import pytest
import torch

from elastic_dp.cluster.worker import prepare_environment
from elastic_dp.data import open_data
from elastic_dp.device import gpu
from elastic_dp.train.exactness.machine_kind import deterministic_kernels
from elastic_dp.train.local_run import LocalRun
from tests.device import fake_gpu
from tests.runs import spec_of
from tests.train.jobs import adamw, classifier, cross_entropy

NAME = "CUBLAS_WORKSPACE_CONFIG"
GPU = torch.device("cuda", 0)


@pytest.fixture
def products(monkeypatch):
    """Returns the values of the variable at each product that is made for torch to look for it."""
    seen = []
    monkeypatch.setenv(NAME, "")  # so that it is restored
    monkeypatch.delenv(NAME)
    monkeypatch.setattr(gpu, "_multiply", lambda device: seen.append(os.environ.get(NAME)))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
    return seen


def torch_reads_it_once(monkeypatch, once):
    monkeypatch.setattr(gpu, "_reads_cublas_config_once", lambda: once)


@pytest.mark.parametrize(
    ("exact", "device", "once", "within", "made"),
    [
        (True, GPU, False, None, [":4096:8"]),  # for one product, since torch parses it in each
        (True, GPU, True, ":4096:8", []),
        *((False, GPU, once, None, []) for once in (False, True)),
        *((True, torch.device("cpu"), once, None, []) for once in (False, True)),
    ],
)
def test_variable_is_set_in_an_exact_run_on_a_gpu_as_long_as_that_costs_nothing(
    exact, device, once, within, made, products, monkeypatch
):
    torch_reads_it_once(monkeypatch, once)
    environment = {}
    prepare_environment(environment, 1)
    with deterministic_kernels(exact, [], device):
        assert os.environ.get(NAME) == within and NAME not in environment
    assert products == made


def test_a_value_of_the_user_stays(products, monkeypatch):
    torch_reads_it_once(monkeypatch, False)
    monkeypatch.setenv(NAME, ":16:8")
    with deterministic_kernels(True, [], GPU):
        gpu.keep_cublas_config(torch.nn.LSTM(2, 2), GPU)
        assert os.environ[NAME] == ":16:8"
    assert products == []


@pytest.mark.parametrize(("layer", "kept"), [(torch.nn.LSTM, True), (torch.nn.Linear, False)])
def test_model_with_recurrent_layers_keeps_the_variable(layer, kept, products, monkeypatch):
    torch_reads_it_once(monkeypatch, False)
    with deterministic_kernels(True, [], GPU):
        gpu.keep_cublas_config(torch.nn.Sequential(layer(2, 2)), GPU)
        assert (NAME in os.environ) == kept


class Recurrent(torch.nn.LSTM):
    def flatten_parameters(self):
        """Asks for the GPU's cuDNN."""


@pytest.mark.parametrize(("layer", "kept"), [(Recurrent, True), (torch.nn.Linear, False)])
def test_run_of_a_model_with_recurrent_layers_keeps_the_variable(
    layer, kept, products, monkeypatch
):
    torch_reads_it_once(monkeypatch, False)
    found = []

    def train(ctx):
        with ctx.device:
            model = classifier()
            model[0].more = layer(2, 2)
        for _ in ctx.steps(model, adamw(model), cross_entropy):
            found.append(NAME in os.environ)

    spec = spec_of(steps=1)
    fake_gpu.install(partial(monkeypatch.setattr, raising=False))
    with fake_gpu.modes():
        data = open_data(spec.data, virtual_workers=spec.scaling.virtual_workers)
        LocalRun(spec, data, GPU).run(train)
    assert found == [kept]


@pytest.mark.parametrize(
    ("version", "once"),
    [("2.11.0+cu130", False), ("2.12.1", False), ("2.13.0+cpu", True), ("2.14.0a0", True)],
)
def test_versions_of_torch_that_read_the_variable_once(version, once, monkeypatch):
    monkeypatch.setattr(torch, "__version__", version)
    assert gpu._reads_cublas_config_once() == once
