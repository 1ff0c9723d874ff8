"""The kernel of attention of an exact run on a GPU."""

import warnings
from functools import partial

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from elastic_dp.data import open_data
from elastic_dp.device import attention
from elastic_dp.train.exactness.machine_kind import deterministic_kernels
from elastic_dp.train.local_run import LocalRun
from tests.device import fake_gpu
from tests.runs import spec_of
from tests.train.jobs import adamw, classifier, cross_entropy

GPU, CPU = fake_gpu.GPU, torch.device("cpu")
ALL = {"flash", "mem_efficient", "math", "cudnn"}


def enabled():
    return {*attention.enabled_kernels()}


@pytest.fixture(autouse=True)
def _value_of_the_user(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")  # else a product would need a GPU
    monkeypatch.setattr(attention, "_BACKWARD", OF_CPUS)


# The operator of flash attention on CPUs stands for those on GPUs.
NAME = "_scaled_dot_product_flash_attention_for_cpu_backward"
OF_CPUS = {"CPU": (NAME,)}


@pytest.fixture
def strict():
    """Whether torch was strict, at each call of the operator."""
    seen = []
    library = torch.library.Library("aten", "IMPL")
    kernel = torch.library.get_kernel(f"aten::{NAME}", "CPU")

    def spy(keys, *args, **kwargs):
        seen.append(strictness())
        return kernel.call_boxed(keys, *args, **kwargs)

    with warnings.catch_warnings(action="ignore"):
        library.impl(NAME, spy, "CPU", with_keyset=True, allow_override=True)

    def taken():
        times = [*seen]
        seen.clear()
        return times

    yield taken
    del library


def strictness():
    enabled = torch.are_deterministic_algorithms_enabled()
    return enabled and not torch.is_deterministic_algorithms_warn_only_enabled()


def attend(q, k, v):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


class Put(torch.autograd.Function):
    """An operator without a deterministic kernel, in the same backward pass."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        torch.zeros(4).put_(torch.tensor([0, 1]), torch.tensor([1.0, 2.0]))
        return gradient


def gradients(function):
    generator = torch.Generator().manual_seed(0)
    qkv = [torch.randn(2, 2, 64, 16, generator=generator, requires_grad=True) for _ in range(3)]
    Put.apply(function(*qkv)).square().sum().backward()
    return [x.grad for x in qkv]


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # by Inductor's import
@pytest.mark.parametrize("backend", [None, "aot_eager", "inductor"])
def test_backward_pass_of_attention_alone_is_strict(backend, strict):
    function = attend if backend is None else torch.compile(attend, backend=backend)
    if backend is not None:
        torch._dynamo.reset()
    because = []
    with deterministic_kernels(True, because, GPU):
        within = gradients(function)
        assert strict() == [True]
        assert not strictness()
        assert because == ["put_ does not have a deterministic implementation"]
    outside = gradients(attend)
    assert strict() == [False]
    assert all(map(torch.equal, within, outside))


def test_mode_that_the_user_sets_stays(strict):
    with deterministic_kernels(True, [], GPU):
        torch.use_deterministic_algorithms(False)
        gradients(attend)
        assert not torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(True)
        with pytest.raises(RuntimeError, match="put_"):
            gradients(attend)
        assert strictness()
    assert strict() == [False]


def test_kernel_that_raises_leaves_the_mode_as_it_was(monkeypatch):
    class Kernel:
        def call_boxed(self, keys):
            assert strictness()
            raise RuntimeError("out of memory")

    with deterministic_kernels(True, [], GPU):
        with pytest.raises(RuntimeError, match="out of memory"):
            attention._strictly(Kernel(), None)
        assert torch.is_deterministic_algorithms_warn_only_enabled()


@pytest.mark.skipif(not torch.version.cuda, reason="torch is built without CUDA")
def test_operators_of_a_build_for_cuda_are_replaced_and_put_back(monkeypatch):
    monkeypatch.undo()

    def registered():
        ((key, names),) = attention._BACKWARD.items()
        return [str(torch.library.get_kernel(f"aten::{name}", key)) for name in names]

    before = registered()
    with attention.exact_attention(GPU):
        assert not {*registered()} & {*before}
    assert registered() == before


@pytest.mark.parametrize(
    ("exact", "device", "kernels"),
    [(True, GPU, ALL - {"cudnn"}), (False, GPU, ALL), (True, CPU, ALL)],
)
def test_exact_run_on_a_gpu_attends_by_kernels_that_can_be_deterministic(exact, device, kernels):
    before = enabled()
    with deterministic_kernels(exact, [], device):
        assert enabled() == kernels
    assert enabled() == before == ALL


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
    assert sum("attention" in text and "slower" in text for text in said) == times
