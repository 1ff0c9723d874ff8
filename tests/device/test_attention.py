"""The kernel of attention of an exact run on a GPU, and its backward pass."""

import warnings
from functools import partial
from typing import ClassVar

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
STRICT = {"flash", "mem_efficient", "math"}
FLASH = (
    "Flash Attention defaults to a non-deterministic algorithm. To explicitly enable determinism "
    "call torch.use_deterministic_algorithms(True, warn_only=False)."
)


def enabled():
    return {name for name in _ATTENTION if getattr(torch.backends.cuda, f"{name}_sdp_enabled")()}


@pytest.fixture(autouse=True)
def _value_of_the_user(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")  # else a product would need a GPU


@pytest.mark.parametrize(
    ("exact", "device", "kernels"),
    [(True, GPU, STRICT), (False, GPU, {*_ATTENTION}), (True, CPU, {*_ATTENTION})],
)
def test_exact_run_on_a_gpu_attends_by_kernels_that_can_be_deterministic(exact, device, kernels):
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


class Attention(torch.autograd.Function):
    """Does in its backward pass what torch's flash attention does there on a GPU."""

    strict: ClassVar = []  # whether each pass was

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if not torch.backends.cuda.flash_sdp_enabled():  # the math kernel
            return gradient
        enabled = torch.are_deterministic_algorithms_enabled()
        warns = enabled and torch.is_deterministic_algorithms_warn_only_enabled()
        Attention.strict.append(enabled and not warns)
        if warns:
            warnings.warn(FLASH, stacklevel=1)
        return gradient


class Unordered(torch.autograd.Function):
    """An operator whose backward pass has no deterministic kernel."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        text = "unordered_backward_cuda does not have a deterministic implementation"
        if not torch.is_deterministic_algorithms_warn_only_enabled():
            raise RuntimeError(f"{text}, but you set 'torch.use_deterministic_algorithms(True)'.")
        warnings.warn(f"{text}, but you set it with warn_only=True.", stacklevel=1)
        return gradient


def run(monkeypatch, *operators, before=None, **fields):
    """Trains by these operators on a GPU. Returns what was said, why the run is not exact, and the
    kernels of attention in the loop's body."""
    said, kernels, Attention.strict = [], set(), []

    def loss_fn(model, batch):
        loss = cross_entropy(model, batch)
        for operator in operators:
            loss = operator.apply(loss)
        return loss

    def train(ctx):
        with ctx.device:
            model = classifier()
        if before is not None:
            before()
        for _ in ctx.steps(model, adamw(model), loss_fn):
            kernels.update(enabled())
            assert torch.is_deterministic_algorithms_warn_only_enabled() or not fields["exact"]

    spec = spec_of(steps=2, **fields)
    fake_gpu.install(partial(monkeypatch.setattr, raising=False))
    with fake_gpu.modes():
        data = open_data(spec.data, virtual_workers=spec.scaling.virtual_workers)
        result = LocalRun(spec, data, GPU, on_say=said.append).run(train)
    return said, result.inexact_because, kernels


def test_attention_of_an_exact_run_is_deterministic_in_all_backward_passes_and_said_once(
    monkeypatch,
):
    said, because, kernels = run(monkeypatch, Attention, exact=True)
    assert not because and kernels == STRICT
    first, *later = Attention.strict
    assert not first and later and all(later)
    assert sum("backward passes of flash" in text and "slower" in text for text in said) == 1


def test_attention_runs_by_the_math_kernel_where_strict_passes_are_errors(monkeypatch):
    said, because, kernels = run(monkeypatch, Attention, Unordered, exact=True)
    assert because == ["unordered_backward_cuda does not have a deterministic implementation"]
    assert kernels == {"math"}
    assert sum("math kernel" in text and "slower" in text for text in said) == 1


def test_attention_of_the_user_stays_and_is_named_where_strict_passes_are_errors(monkeypatch):
    def choose():
        torch.backends.cuda.enable_cudnn_sdp(False)
        torch.backends.cuda.enable_math_sdp(False)

    said, because, kernels = run(monkeypatch, Attention, Unordered, before=choose, exact=True)
    assert kernels == {"flash", "mem_efficient"}
    assert any("Flash Attention" in text for text in because)
    assert not any("math kernel" in text for text in said)


def test_kernel_that_the_loss_function_chooses_is_named_where_strict_passes_are_errors(monkeypatch):
    """The math kernel, which others get then, is not what it uses."""
    monkeypatch.setattr(torch.backends.cuda, "flash_sdp_enabled", lambda: True)
    _, because, _ = run(monkeypatch, Attention, Unordered, exact=True)
    assert any("Flash Attention" in text for text in because)


def test_attention_before_the_loop_stays_a_reason(monkeypatch):
    """It may have been captured into a graph, which does not ask again."""

    def capture():
        Attention.apply(torch.ones(1, requires_grad=True)).sum().backward()

    _, because, _ = run(monkeypatch, Attention, before=capture, exact=True)
    assert because == [FLASH.partition(". ")[0]]


@pytest.mark.parametrize(("operators", "exact"), [((), True), ((Attention,), False)])
def test_run_without_attention_or_exactness_has_plain_passes(operators, exact, monkeypatch):
    said, because, _ = run(monkeypatch, *operators, exact=exact)
    assert not because and not any(Attention.strict)
    assert not any("attention" in text for text in said)
