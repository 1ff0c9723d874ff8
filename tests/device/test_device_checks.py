"""A worker whose GPU fails a check is refused by name."""

import functools
import os
import sys
import threading
import types

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from elastic_dp.device.device_checks import admit
from elastic_dp.errors import ClusterError
from tests.device import fake_gpu

ONE = {"GPU": 1}


class NVMLError(Exception):
    pass


def nvml(errors=0, failed=0, reasons=0, *, known=True, init=True):
    """The module, for one GPU."""

    def answer(value, known=known):
        def asked(*_):
            if not known:
                raise NVMLError("Not Supported")
            return value

        return asked

    def handle(uuid):
        assert uuid == "GPU-8932f937"
        return "handle"

    return types.SimpleNamespace(
        NVMLError=NVMLError,
        NVML_MEMORY_ERROR_TYPE_UNCORRECTED=1,
        NVML_VOLATILE_ECC=0,
        nvmlClocksThrottleReasonHwSlowdown=0x8,
        nvmlClocksThrottleReasonHwThermalSlowdown=0x40,
        nvmlClocksThrottleReasonHwPowerBrakeSlowdown=0x80,
        nvmlInit=answer(None, init),
        nvmlShutdown=lambda: None,
        nvmlDeviceGetHandleByUUID=handle,
        nvmlDeviceGetTotalEccErrors=answer(errors),
        nvmlDeviceGetRemappedRows=answer((3, 0, 0, failed)),
        nvmlDeviceGetCurrentClocksThrottleReasons=answer(reasons),
    )


class OneWrongElement(TorchDispatchMode):
    """One bit of each product in this precision is another one."""

    def __init__(self, dtype):
        super().__init__()
        self.dtype = dtype

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        if operator is torch.ops.aten.mm.default and result.dtype is self.dtype:
            result[-1, -1] += 1
        return result


@pytest.fixture
def gpu(monkeypatch):
    """A GPU, with this NVML."""
    fake_gpu.install(functools.partial(monkeypatch.setattr, raising=False))
    monkeypatch.setattr("elastic_dp.device.device_checks._TILES", 1)
    monkeypatch.setattr("elastic_dp.device.gpu._multiply", lambda device: None)
    monkeypatch.setitem(sys.modules, "pynvml", None)  # not installed
    with fake_gpu.modes():
        yield


def check(resources=ONE, labels=None, **how):
    how = {"exact": True, "shared": False, "patience_s": 0.0} | how
    admit(fake_gpu.GPU, resources, labels or {}, **how)


@pytest.mark.parametrize(
    "found",
    [
        None,
        nvml(reasons=0x4 | 0x20),  # the limit of its power, which is no fault
        nvml(errors=1, failed=1, reasons=0x8, known=False),
        nvml(errors=1, init=False),
    ],
)
@pytest.mark.parametrize("labels", [{}, {"ray.io/accelerator-type": "FAKE-40G"}])
def test_worker_whose_gpu_is_right_is_admitted(found, labels, gpu, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", found)
    check({"GPU": 1, "accelerator_type:Fake": 0.001}, labels)


@pytest.mark.parametrize(
    ("found", "check_name", "said"),
    [
        (nvml(errors=2), "ecc", "2 uncorrectable errors"),
        (nvml(failed=1), "ecc", "a row could not be remapped"),
        (nvml(reasons=0x48), "throttling", "heat slows its clocks"),
        (nvml(reasons=0x88), "throttling", "its power supply slows"),
        (nvml(reasons=0x8), "throttling", "its hardware slows"),
    ],
)
def test_worker_is_refused_by_what_nvml_knows(found, check_name, said, gpu, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", found)
    with pytest.raises(ClusterError, match=f"fails the check '{check_name}': .*{said}"):
        check()


def test_worker_is_refused_whose_driver_does_not_answer(gpu, monkeypatch):
    answers, silent = threading.Event(), nvml()
    silent.nvmlInit = answers.wait
    monkeypatch.setitem(sys.modules, "pynvml", silent)
    monkeypatch.setattr("elastic_dp.device.device_checks.ANSWER_S", 0.1)
    with pytest.raises(ClusterError, match=r"fails the check 'nvml': .* not answered for 0.1 s"):
        check()
    answers.set()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_worker_whose_gpu_multiplies_wrongly_is_refused(dtype, gpu):
    with (
        OneWrongElement(dtype),
        pytest.raises(ClusterError, match=f"1 of 65536 elements of a matrix product in {dtype}"),
    ):
        check()


@pytest.mark.parametrize(("exact", "value"), [(True, ":4096:8"), (False, None)])
def test_torch_finds_the_setting_of_cublas_at_the_first_product_of_an_exact_run(
    exact, value, gpu, monkeypatch
):
    """It looks for it once."""
    monkeypatch.setattr("elastic_dp.device.gpu._reads_cublas_config_once", lambda: True)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # so that it is restored
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    found = []

    def multiply(device):
        found.append(os.environ.get("CUBLAS_WORKSPACE_CONFIG"))

    monkeypatch.setattr("elastic_dp.device.device_checks._check_product", multiply)
    check(exact=exact)
    assert found == [value]


@pytest.mark.parametrize(
    ("resources", "shared", "refused"),
    [(ONE, False, True), (ONE, True, False), ({"GPU": 0.25}, False, False)],
)
def test_worker_is_refused_where_others_hold_the_memory_of_its_gpu(
    resources, shared, refused, gpu, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (9 << 30, 80 << 30))
    if not refused:
        return check(resources, shared=shared)
    with pytest.raises(ClusterError, match=r"'memory': 9.7 of 85.9 GB are free"):
        check(resources, shared=shared)


def test_worker_waits_for_the_memory_of_the_one_before_it(gpu, monkeypatch):
    free = iter([9 << 30, 79 << 30])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (next(free), 80 << 30))
    check(patience_s=60.0)
    assert list(free) == []


@pytest.mark.parametrize(
    ("resources", "labels"),
    [
        ({"GPU": 1, "accelerator_type:H100": 0.001}, {}),
        (ONE, {"ray.io/accelerator-type": "A100-40G"}),
    ],
)
def test_worker_with_another_gpu_than_the_job_asks_for_is_refused(resources, labels, gpu):
    with pytest.raises(ClusterError, match=r"it is a fake GPU, and the job asks for [HA]100"):
        check(resources, labels)


def test_worker_without_a_gpu_is_not_checked(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", None)
    admit(torch.device("cpu"), {"CPU": 1}, {}, exact=True, shared=False)
