"""Which machines are expected to compute the same bits, and what breaks exactness, or changes when
a run is started again, is said by name."""

import contextlib
import itertools
import logging
import types
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch

from elastic_dp.errors import SpecError
from elastic_dp.train.exactness.machine_kind import deterministic_kernels, machine_kind
from elastic_dp.train.fault_injection import WorkerFault
from tests.runs import fit, group, local, spec_of
from tests.train.jobs import classify, cross_entropy

CPUS = {
    "intel": (
        "processor\t: 0\nvendor_id\t: GenuineIntel\ncpu family\t: 6\nmodel\t\t: 106\nmodel "
        "name\t: Xeon @ 2.90GHz\n\n"
    ),
    "older": (
        "processor\t: 0\nvendor_id\t: GenuineIntel\ncpu family\t: 6\nmodel\t\t: 85\nmodel "
        "name\t: Xeon @ 2.90GHz\n\n"
    ),
    "amd": "processor\t: 0\nvendor_id\t: AuthenticAMD\ncpu family\t: 26\nmodel\t\t: 2\n\n",
    "arm": "processor\t: 0\nBogoMIPS\t: 2100.00\nCPU implementer\t: 0x41\nCPU part\t: 0xd40\n\n",
}


def kind(monkeypatch, cpuinfo):
    monkeypatch.setattr(Path, "read_text", lambda path: cpuinfo)
    return machine_kind(torch.device("cpu"), exact=True)


def test_processors_of_two_makes_are_two_kinds_and_their_speed_is_none(monkeypatch):
    kinds = {name: kind(monkeypatch, cpuinfo) for name, cpuinfo in CPUS.items()}
    assert len(set(kinds.values())) == 4, kinds
    again = CPUS["intel"].replace("2.90GHz", "2.60GHz") + CPUS["intel"]
    assert kind(monkeypatch, again) == kinds["intel"]
    assert "GenuineIntel 6 106" in kinds["intel"]


@pytest.mark.parametrize("exact", [False, True])
def test_a_machine_without_proc(monkeypatch, exact):
    def missing(path):
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "read_text", missing)
    assert f"exact {exact}; cpu " in machine_kind(torch.device("cpu"), exact)


@pytest.fixture
def gpu(monkeypatch):
    """The kind of a machine with a GPU; the settings are torch's own, and restored."""
    properties = types.SimpleNamespace(name="H100", multi_processor_count=132, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    cuda, cudnn, mkldnn = torch.backends.cuda, torch.backends.cudnn, torch.backends.mkldnn
    precisions = [cuda.matmul, cudnn.conv, cudnn.rnn, mkldnn.matmul]
    before = [module.fp32_precision for module in precisions]
    yield lambda: machine_kind(torch.device("cuda", 0), exact=True)
    for module, value in zip(precisions, before, strict=True):
        module.fp32_precision = value


def set_in(module, name, value):
    """A change of a setting of torch's, and its inverse."""

    def change():
        before = getattr(module, name)
        setattr(module, name, value)
        return lambda: setattr(module, name, before)

    return change


def sdp(name):
    def change():
        getattr(torch.backends.cuda, f"enable_{name}_sdp")(False)
        return lambda: getattr(torch.backends.cuda, f"enable_{name}_sdp")(True)

    return change


MATMUL = torch.backends.cuda.matmul
SETTINGS = {
    "matmul in TF32": set_in(MATMUL, "fp32_precision", "tf32"),
    "convolution in IEEE": set_in(torch.backends.cudnn.conv, "fp32_precision", "ieee"),
    "recurrent in IEEE": set_in(torch.backends.cudnn.rnn, "fp32_precision", "ieee"),
    "fp16 reduced": set_in(MATMUL, "allow_fp16_reduced_precision_reduction", False),
    "bf16 reduced": set_in(MATMUL, "allow_bf16_reduced_precision_reduction", False),
    "fp16 accumulation": set_in(MATMUL, "allow_fp16_accumulation", True),
    "cudnn": set_in(torch.backends.cudnn, "enabled", False),
    **{f"no {name} attention": sdp(name) for name in ("flash", "mem_efficient", "math", "cudnn")},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_kind_of_a_gpu_changes_with_each_setting_that_chooses_its_kernels(name, gpu):
    before = gpu()
    undo = SETTINGS[name]()
    try:
        assert gpu() != before
    finally:
        undo()
    assert gpu() == before


def test_kind_of_a_gpu_names_its_model_its_libraries_and_overrides(gpu, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91400)
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", lambda: "cublaslt")
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    named = ("H100, 132 SMs, capability 9.0", "cuda 13.0, cudnn 91400", "blas cublaslt, ")
    for words in (*named, "NVIDIA_TF32_OVERRIDE 0"):
        assert words in gpu()


def test_kind_of_a_gpu_with_mixed_precisions_does_not_raise(gpu):
    """Torch's own `torch.backends.cudnn.allow_tf32` does."""
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    with pytest.raises(RuntimeError):
        _ = torch.backends.cudnn.allow_tf32
    assert "fp32 none/ieee/tf32" in gpu()


def test_kind_of_a_cpu_names_a_lowered_precision_of_float32(gpu):
    before = machine_kind(torch.device("cpu"), exact=True)
    assert "fp32" not in before
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    assert machine_kind(torch.device("cpu"), exact=True) == f"{before}; fp32 bf16/none/none"


PUT = "put_ does not have a deterministic implementation"


def has_no_deterministic_kernel():
    torch.zeros(4).put_(torch.tensor([0, 1]), torch.tensor([1.0, 2.0]), accumulate=False)


@pytest.mark.parametrize("action", ["ignore", "error", "once"])
def test_operation_without_a_deterministic_kernel_is_named_in_each_run_of_a_process(action):
    """Python and torch tell of it once in a process, or never where the user has said so."""
    with warnings.catch_warnings():
        warnings.simplefilter(action)
        always = torch.is_warn_always_enabled()
        for _ in range(2):
            because = []
            with deterministic_kernels(True, because, torch.device("cpu")):
                for _ in range(3):
                    has_no_deterministic_kernel()
            assert because == [PUT]
        assert not [one for one in warnings.filters if "deterministic" in str(one[1])]
        assert torch.is_warn_always_enabled() == always


CPU = torch.device("cpu")


class NotDeterministic(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        has_no_deterministic_kernel()
        return gradient


def of_user(show):
    """A function that shows warnings, and leaves most of it to another."""
    return lambda *args, **kwargs: show(*args, **kwargs)


def wrap():
    warnings.showwarning = of_user(warnings.showwarning)


@pytest.mark.parametrize(
    "redirect",
    [
        lambda: warnings.simplefilter("ignore"),
        lambda: warnings.filterwarnings("ignore", category=UserWarning),
        warnings.resetwarnings,
        lambda: logging.captureWarnings(True),
        wrap,
    ],
)
@pytest.mark.parametrize("where", ["before the loop", "in the loss", "in the body"])
def test_user_code_that_hides_warnings_does_not_make_a_run_exact(redirect, where):
    def train(ctx):
        def loss_fn(model, batch):
            if where == "in the loss":
                redirect()
            return NotDeterministic.apply(model(batch["x"])).square().mean()

        if where == "before the loop":
            redirect()
        classify(ctx, loss_fn, body=lambda step: where == "in the body" and redirect())

    with warnings.catch_warnings():
        run = local(spec_of(steps=3), train)
        logging.captureWarnings(False)
    assert run._session.state.inexact_because == [PUT]


@pytest.mark.parametrize("hides", [True, False])
def test_operator_of_a_later_forward_pass_is_noted_after_a_body_that_filters_warnings(hides):
    calls = []

    def train(ctx):
        def loss_fn(model, batch):
            calls.append(1)
            if len(calls) > 4:
                has_no_deterministic_kernel()
            return model(batch["x"]).square().mean()

        classify(ctx, loss_fn, body=lambda step: hides and warnings.simplefilter("ignore"))

    with warnings.catch_warnings():
        run = local(spec_of(steps=8, virtual=1, workers=1), train)
    assert run._session.state.inexact_because == [PUT]


@contextlib.contextmanager
def captured_and_not_released():
    logging.captureWarnings(True)
    yield


@contextlib.contextmanager
def recorded():
    with warnings.catch_warnings(record=True):
        yield


@contextlib.contextmanager
def wrapped():
    wrap()
    yield


@pytest.mark.parametrize("around", [recorded, captured_and_not_released, wrapped])
def test_warnings_after_a_run_are_shown_and_not_noted(around):
    shown, because = [], []
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *args, **kwargs: shown.append(str(message))
        mine = warnings.showwarning
        with deterministic_kernels(True, because, CPU) as listen, around():
            listen()
        logging.captureWarnings(False)
        warnings.warn("not deterministic", stacklevel=1)
        assert warnings.showwarning is mine or around is not recorded
    assert shown == ["not deterministic"] and because == []


def test_redirecting_warnings_in_each_step_makes_no_long_chain():
    because = []
    with warnings.catch_warnings(), deterministic_kernels(True, because, CPU) as listen:
        for _ in range(20_000):
            before = warnings.showwarning
            warnings.showwarning = print
            listen()
            warnings.showwarning = before
            listen()
        has_no_deterministic_kernel()
    assert because == [PUT]


def test_what_was_noted_before_a_restart_counts_at_the_end(tmp_path):
    calls = itertools.count(1)

    def train(ctx):
        def loss_fn(model, batch):
            if next(calls) == 6:
                has_no_deterministic_kernel()
            return cross_entropy(model, batch)

        classify(ctx, loss_fn)

    for steps in (3, 5):
        result = fit(train, tmp_path, steps)
        assert result.inexact_because == (PUT,) and not result.exact


def only_the_second_is_inexact(ctx):
    calls = itertools.count(1)

    def loss_fn(model, batch):
        if next(calls) == 6 and ctx.rank == 1:  # in step 1 or 2
            has_no_deterministic_kernel()
        return cross_entropy(model, batch)

    classify(ctx, loss_fn)


def test_what_a_worker_has_noted_outlives_it(tmp_path):
    dead = WorkerFault("before_forward", step=4, rank=1, once=str(tmp_path / "dead"))
    spec = spec_of(steps=6, workers=2, min_workers=2)
    outcome, _ = group(spec, only_the_second_is_inexact, faults=(dead,))
    assert outcome.workers_lost == 1 and outcome.inexact_because == (PUT,)


@pytest.mark.parametrize(
    "options", [{"precision": "bf16"}, {"clip_norm": 0.3}, {"clip_value": 0.1}]
)
def test_option_of_the_loop_that_changes_at_a_restart_is_said_by_name(options, tmp_path):
    said = []
    local(spec_of(steps=3), classify, str(tmp_path), said.append)
    assert not [text for text in said if "of ctx.steps" in text]
    local(spec_of(steps=5), partial(classify, **options), str(tmp_path), said.append)
    ((name, value),) = options.items()
    expected = f"{name}={value!r} of ctx.steps counts from step 4 on; it was None before"
    assert [text for text in said if expected in text]


def test_flags_of_torch_that_may_not_be_set_are_refused_by_name(monkeypatch):
    flags = torch.backends.disable_global_flags.__globals__
    monkeypatch.setitem(flags, "__allow_nonbracketed_mutation_flag", False)
    with pytest.raises(SpecError, match="disable_global_flags"):
        deterministic_kernels(True, [], CPU).__enter__()
    assert not torch.are_deterministic_algorithms_enabled()
