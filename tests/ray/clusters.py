"""Rays of a test's own, whose workers find the tests' modules.

Each has the processes that a test needs, and no others: no workers started in advance (ours have an
environment of their own, which those lack), no autoscaler, nobody who reads logs. And none stands
behind the other processes of the machine.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import ray

import tests

ROOT = os.path.dirname(os.path.dirname(tests.__file__))
os.environ |= {"RAY_prestart_worker_first_driver": "0", "RAY_worker_niceness": "0"}


def connect(address: str) -> None:
    environment = {"env_vars": {"PYTHONPATH": ROOT}}
    ray.init(address=address, log_to_driver=False, runtime_env=environment)


@contextlib.contextmanager
def nodes(places: int) -> Iterator[Any]:
    """A head with so many places, to which nodes may be added."""
    from ray.cluster_utils import Cluster

    without = dict.fromkeys(("include_dashboard", "include_log_monitor"), False)
    head = {"num_cpus": places, "no_monitor": True, **without}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        connect(cluster.address)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()
