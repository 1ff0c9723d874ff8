"""Each process of a worker sees one of the worker's GPUs, and no other one; and which of torch's
two implementations of NCCL it uses."""

import types

import pytest
import ray
import torch

from elastic_dp.cluster.ray import worker_actor
from elastic_dp.device import gpu
from elastic_dp.device.gpu import visible_to_processes
from elastic_dp.errors import ClusterError
from elastic_dp.extensions.gangs import followers

NAME = "CUDA_VISIBLE_DEVICES"
UUIDS = ["GPU-0b7a4f0c-9c8e", "GPU-8932f937-d72c"]
PARTS = ["MIG-2f1b3a55-0c0e", "MIG-c6d4f1ef-42e4"]


@pytest.mark.parametrize(
    ("given", "seen"),
    [
        (["0", "1"], ["0", "1"]),
        (["10", "9", "2"], ["2", "9", "10"]),  # Ray gives them in any order
        ([*reversed(UUIDS)], UUIDS),
        (PARTS, PARTS),
    ],
)
def test_process_sees_one_gpu_of_its_worker(given, seen):
    assert visible_to_processes(given, len(given)) == [{NAME: gpu} for gpu in seen]


def test_processes_without_gpus_keep_their_environment():
    assert visible_to_processes([], 3) == [{}, {}, {}]


@pytest.mark.parametrize("given", [["0"], ["0", "1", "2"]])
def test_number_of_gpus_that_is_not_that_of_processes_is_an_error(given):
    with pytest.raises(ClusterError, match=f"has 2 processes, and Ray gave it {len(given)} GPUs"):
        visible_to_processes(given, 2)


CHILD = f"""
import os, sys
from multiprocessing.connection import Connection
Connection(int(sys.argv[1])).send(os.environ["{NAME}"])
"""


def test_child_finds_its_gpu_and_not_its_parents(monkeypatch):
    monkeypatch.setattr(followers, "_MAIN", CHILD)
    monkeypatch.setenv(NAME, "3")
    environments = visible_to_processes(["3", "5"], 2)[1:]
    [follower] = followers.start_followers("w1", environments, None, None)
    assert follower.connection.recv() == "5"
    follower.connection.close()


@pytest.mark.parametrize(
    ("processes", "ids", "first"), [(1, ["7"], {}), (2, ["7", "5"], {NAME: "5"}), (2, [], {})]
)
def test_actor_gives_its_processes_what_ray_has_given_it(processes, ids, first, monkeypatch):
    """Whatever variables Ray sets: it may be told to set none."""
    context = types.SimpleNamespace(get_accelerator_ids=lambda: {"GPU": ids})
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    environments = worker_actor._environments(processes)
    assert len(environments) == processes and environments[0] == first


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
