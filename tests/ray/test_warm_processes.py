"""Ray gives a process that waits to the next actor on its node."""

import os
import sys

import psutil
import pytest
import ray

from elastic_dp.cluster.ray import private
from elastic_dp.cluster.ray.warm_processes import WarmProcesses
from tests.patience import eventually
from tests.ray import clusters

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module", autouse=True)
def cluster():
    with clusters.nodes(1, minimal=False):
        yield


@ray.remote
class Replacement:
    def process(self) -> tuple[int, bool]:
        return os.getpid(), "torch._dynamo" in sys.modules


def waiting_with(name: str) -> set[int]:
    """The processes without a task that have this environment variable and have mapped torch: the
    hook runs after the process has told Ray that it is there, its title is set before."""
    found = set()
    for process in psutil.process_iter():
        try:
            idle = process.cmdline()[:1] == ["ray::IDLE"] and name in process.environ()
            if idle and any("libtorch" in each.path for each in process.memory_maps()):
                found.add(process.pid)
        except psutil.Error:  # it has ended
            continue
    return found


def test_an_actor_takes_the_process_that_waits():
    name = f"WARM_PROCESS_OF_{os.getpid()}"
    warm = WarmProcesses({name: "1"})
    for _ in range(2):
        warm.refill({"w0": ray.nodes()[0]["NodeID"]}, {})
    eventually(lambda: waiting_with(name))
    (waiting,) = waiting_with(name)
    environment = {"env_vars": warm.environment}
    actor = Replacement.options(num_cpus=1, runtime_env=environment).remote()
    assert ray.get(actor.process.remote()) == (waiting, True)
    ray.kill(actor)


def test_the_hook_has_the_name_that_ray_gives_it():
    assert private.SETUP_HOOK == ray._private.ray_constants.WORKER_PROCESS_SETUP_HOOK_ENV_VAR
