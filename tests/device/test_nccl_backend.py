"""Which of torch's two implementations of NCCL the processes of a worker use."""

import pytest
import torch

from elastic_dp.device import gpu


@pytest.mark.parametrize(
    ("version", "backends"),
    [
        ("2.11.0+cu130", "cpu:gloo,cuda:nccl"),
        ("2.14.1", "cpu:gloo,cuda:nccl"),
        ("2.15.0a0+git1", "cpu:gloo,cuda:nccl-legacy"),
        ("2.16.0", "cpu:gloo,cuda:nccl-legacy"),
    ],
)
def test_backend_is_the_one_whose_options_are_passed(version, backends, monkeypatch):
    """From torch 2.15 on "nccl" means nccl2."""
    monkeypatch.setattr(torch, "__version__", version)
    assert gpu.backends_of_mesh(torch.device("cuda", 0), shared=False) == backends
    assert gpu.backends_of_mesh(torch.device("cuda", 0), shared=True) == "cpu:gloo,cuda:gloo"
    assert gpu.backends_of_mesh(torch.device("cpu"), shared=False) == "gloo"
