"""The kernel of attention of an exact run on a GPU."""

import contextlib
import threading
import time
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
    monkeypatch.setattr(attention, "_BACKWARD", (NAME,))


# The operator of flash attention on CPUs stands for those on GPUs.
NAME = "_scaled_dot_product_flash_attention_for_cpu_backward"


def watch(seen):
    """Replaces the kernel, until what it returns is gone, by one that notes in `seen` whether torch
    is strict at each call."""
    library = torch.library.Library("aten", "IMPL")
    own = torch.library.get_kernel(f"aten::{NAME}", "CPU")

    def kernel(keys, *args, **kwargs):
        seen.append(strictness())
        return own.call_boxed(keys, *args, **kwargs)

    with warnings.catch_warnings(action="ignore"):
        library.impl(NAME, kernel, "CPU", with_keyset=True)  # without allow_override
    return library


@pytest.fixture
def strict():
    """Whether torch was strict, at each call of the operator."""
    seen = []
    library = watch(seen)

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
        for warn_only in (False, True):
            torch.use_deterministic_algorithms(False, warn_only=warn_only)
            gradients(attend)
            assert not torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(True)
        with pytest.raises(RuntimeError, match="put_"):
            gradients(attend)
        assert strictness()
    assert strict() == [False, False]


def test_operator_that_raises_leaves_the_mode_as_it_was():
    class Operator:
        def redispatch(self, keys):
            assert strictness()
            raise RuntimeError("out of memory")

    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    with deterministic_kernels(True, [], GPU):
        with pytest.raises(RuntimeError, match="out of memory"):
            attention._strictly(Operator(), keys)
        assert torch.is_deterministic_algorithms_warn_only_enabled()


def test_kernels_that_users_replace_meanwhile_are_called_in_strict_mode():
    """As FlashAttention 3 and 4 replace those of GPUs when they are activated."""
    seen = []
    before = watch(seen)
    with deterministic_kernels(True, [], GPU):
        gradients(attend)
        del before
        gradients(attend)
        within = watch(seen)
        gradients(attend)
        del within
    assert seen == [True, True]


def test_operators_wait_without_the_interpreters_lock():
    """A call that waits for a device would hold up the thread that aborts what it waits for."""
    beats, ended = [], threading.Event()

    def beat():
        while not ended.wait(0.001):
            beats.append(time.monotonic())

    sides = [torch.randn(1500, 1500) for _ in range(2)]
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    thread = threading.Thread(target=beat)
    thread.start()
    try:
        begin = time.monotonic()
        attention._strictly(torch.ops.aten.mm.default, keys, *sides)
        end = time.monotonic()
    finally:
        ended.set()
        thread.join()
    assert len([at for at in beats if begin < at < end]) > 5


def test_two_runs_may_overlap(strict):
    with contextlib.ExitStack() as first:
        first.enter_context(attention.exact_attention(GPU))
        with deterministic_kernels(True, [], GPU):
            first.close()
            gradients(attend)
    assert strict() == [True]


@pytest.mark.skipif(not torch.version.cuda, reason="torch is built without CUDA")
def test_flash_attention_of_a_build_for_cuda_reads_the_mode_that_is_set(capfd):
    """Without a GPU it fails soon after it has warned of what it does in the usual mode."""
    q, seed = torch.randn(1, 64, 2, 16, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.int64)
    args = (q, q, q, q, q, torch.zeros(1, 2, 64), None, None, 64, 64, 0.1, True, seed, None)
    operator = torch.ops.aten._flash_attention_backward.default
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    warned = []
    for call in (operator.redispatch, partial(attention._strictly, operator)):
        because = []
        with deterministic_kernels(True, because, GPU), contextlib.suppress(RuntimeError):
            call(keys, *args, scale=0.25)
        warned.append("non-deterministic" in f"{because} {capfd.readouterr().err}")
    assert warned == [True, False]


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
