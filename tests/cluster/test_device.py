"""A worker that was given a GPU trains on it, or ends and says why. It never trains on the CPU
instead."""

import dataclasses
import types

import pytest
import torch

from elastic_dp.cluster.run_handle import error_of
from elastic_dp.cluster.worker import Worker
from elastic_dp.device.accelerator import has_own_communicator
from elastic_dp.device.gpu import pick_device
from elastic_dp.errors import ClusterError
from tests.runs import group, spec_of
from tests.train.jobs import classify


@pytest.fixture
def cuda(monkeypatch):
    def found(count):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", lambda: count, raising=False)

    return found


@pytest.mark.parametrize(("gpus", "connects"), [(0, False), (0.25, False), (1, True)])
def test_workers_that_share_a_gpu_or_have_none_connect_no_devices(gpus, connects):
    assert has_own_communicator(gpus) is connects


@pytest.mark.parametrize("resources", [{}, {"CPU": 1}, {"CPU": 1, "GPU": 0}])
@pytest.mark.parametrize("count", [0, 1])
def test_pick_device_without_a_gpu_asked_for_is_the_cpu(resources, count, cuda):
    cuda(count)
    assert pick_device(resources) == torch.device("cpu")


@pytest.mark.parametrize("amount", [0.25, 1])
def test_pick_device_with_a_gpu_asked_for_is_that(amount, cuda):
    cuda(1)
    assert pick_device({"GPU": amount}) == torch.device("cuda", 0)


@pytest.mark.parametrize(("build", "said"), [("13.0", "LD_LIBRARY_PATH"), (None, "without CUDA")])
def test_pick_device_with_a_gpu_that_is_not_there_raises(build, said, cuda, monkeypatch):
    cuda(0)
    monkeypatch.setattr(torch.version, "cuda", build)
    with pytest.raises(ClusterError, match="resources_per_worker asks for 1 GPU") as caught:
        pick_device({"GPU": 1})
    assert said in str(caught.value) and "scaling.resources_per_worker.GPU=0" in str(caught.value)


@pytest.mark.parametrize(("seen", "listed"), [(2, "0,3"), (1, "GPU-8932f937"), (8, None)])
def test_pick_device_is_the_first_of_those_that_ray_gave(seen, listed, cuda, monkeypatch):
    cuda(seen)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if listed is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    assert pick_device({"GPU": 1}) == torch.device("cuda", 0)


def test_pick_device_raises_where_cuda_was_asked_before_ray_gave_the_gpu(cuda, monkeypatch):
    cuda(8)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with pytest.raises(ClusterError, match="other GPUs than its own"):
        pick_device({"GPU": 1})


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU is there")
def test_a_worker_without_its_gpu_ends_and_makes_no_step(tmp_path):
    spec = spec_of(workers=1, resources_per_worker={"CPU": 1, "GPU": 1})
    # By the end of a second one the last words of the first have come.
    failure = dataclasses.replace(spec.failure, max_losses_without_progress=2)
    outcome, _ = group(
        dataclasses.replace(spec, failure=failure), classify, url=str(tmp_path), fails=True
    )
    assert outcome.step == 0 and type(error_of(outcome)) is ClusterError
    assert "finds no CUDA device" in (tmp_path / "logs" / "w1.last.log").read_text()


def test_a_worker_whose_gpu_fails_a_check_ends_before_it_is_announced(cuda, monkeypatch):
    posted, checked = [], []

    def refuse(*args, **named):
        checked.append((*args, named))
        raise ClusterError("the GPU of a fails the check 'ecc'")

    cuda(1)
    monkeypatch.setattr("elastic_dp.cluster.worker.admit", refuse)
    worker = object.__new__(Worker)
    worker._spec = spec_of(workers=1, resources_per_worker={"CPU": 1, "GPU": 1})
    worker._job = types.SimpleNamespace(shares_gpu=True)
    worker._link = types.SimpleNamespace(post=posted.append)
    with pytest.raises(ClusterError, match="'ecc'"):
        worker._run()
    how = {"exact": True, "shared": True}
    assert (posted, checked) == ([], [(torch.device("cuda", 0), {"CPU": 1, "GPU": 1}, {}, how)])
