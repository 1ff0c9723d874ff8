"""Workers whose processes are on several nodes, which are network namespaces here: the weights are
those of workers on one node, whatever happens to any process or cable, and strangers do nothing."""

import contextlib
import dataclasses
import itertools
import os
import queue
import socket
import struct
import threading
import time
from multiprocessing import Pipe
from typing import Any

import pytest
import torch.distributed as dist

from elastic_dp.config import FailureConfig, ScalingConfig
from elastic_dp.coordinator.messages import StopRequested
from elastic_dp.errors import ClusterError
from elastic_dp.extensions.gangs import gang_connections
from elastic_dp.extensions.gangs.gang_connections import accept, connect
from elastic_dp.extensions.gangs.gang_control import FollowerControl, LeaderControl
from elastic_dp.extensions.gangs.gang_mesh import interface_of
from tests.chaos.hosts import Network, available
from tests.patience import PATIENCE_S, eventually
from tests.runs import ENDLESS, at_size, goes_on, group, losses_of, scaled
from tests.train.gang.jobs import gangs, trains
from tests.train.gang.test_kills_of_processes import (
    IN_A_STEP_OF_GANGS,
    calm,
    check_kill_while_a_joiner_gets_the_state,
    check_kills_of_each_process,
)

SLOW = pytest.mark.slow
HERE, SECRET = "127.0.0.1", bytes(32)
NODES = pytest.mark.skipif(not available(), reason="needs root and iproute2, to make hosts")


class Nodes:
    """Six hosts: each worker has two, and no two of three that follow one another share one."""

    def __init__(self):
        self.network = Network()
        self.hosts = [self.network.host() for _ in range(6)]

    def host(self, worker, node):
        return self.hosts[2 * (int(worker.removeprefix("w")) % 3) + node]

    @property
    def where(self):
        return {"host_of": self.host, "address": self.network.address}


@pytest.fixture(scope="module")
def nodes():
    made = Nodes()
    yield made
    made.network.close()


@NODES
@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=SLOW)])
def test_gangs_on_several_nodes_have_the_digest_of_one_on_one_node(processes, nodes):
    sizes = {"processes_per_worker": processes, "virtual_workers": 8 // processes}
    alone, _ = group(scaled(gangs(1), **sizes), trains)
    spec = scaled(gangs(2), nodes_per_worker=2, **sizes)
    outcome, run = group(spec, trains, **nodes.where)
    assert outcome.workers_lost == 0, losses_of(run)
    assert (outcome.digest, outcome.inexact_because) == (alone.digest, ())


@NODES
@pytest.mark.parametrize("point", [pytest.param(p, marks=SLOW) for p in IN_A_STEP_OF_GANGS])
def test_process_of_each_node_may_die_at_any_point_of_a_step(point, tmp_path, nodes):
    check_kills_of_each_process(point, tmp_path, **nodes.where)


@SLOW
@NODES
@pytest.mark.parametrize("node", [0, 1])
@pytest.mark.parametrize("point", ["forming", "sending_state", "receiving_state"])
def test_process_of_a_node_may_die_while_a_joiner_gets_the_state(node, point, tmp_path, nodes):
    check_kill_while_a_joiner_gets_the_state(node, point, tmp_path, **nodes.where)


@NODES
@pytest.mark.parametrize("node", [pytest.param(0, marks=SLOW), 1])
def test_node_that_is_cut_off_costs_its_gang_within_seconds(node, nodes):
    """The others hear nothing of it: no connection is closed."""
    took = []

    def cut(run):
        at_size(2)(run)
        victim = max(run.worker_group.processes)
        host, status = nodes.host(victim, node), run.controller.status
        began = time.monotonic()
        host.cut()
        try:
            eventually(lambda: victim not in run.worker_group.processes, status)
            took.append(time.monotonic() - began)
            goes_on(run)
        finally:
            host.heal()

    spec = gangs(2, steps=ENDLESS, min_workers=1, config={"body_s": 0.05}, nodes_per_worker=2)
    spec = dataclasses.replace(spec, failure=FailureConfig(heartbeat_timeout_s=3.0))
    script = [(3, cut), (3, StopRequested("enough"))]
    outcome, run = group(spec, trains, script=script, **nodes.where)
    assert outcome.workers_lost == 1, losses_of(run)
    assert took[0] < 8, took
    assert outcome.digest == calm(outcome.step)[0].digest


def test_each_node_has_its_part_of_the_resources():
    scaling = ScalingConfig(
        processes_per_worker=4, nodes_per_worker=2, resources_per_worker={"CPU": 8, "GPU": 4}
    )
    assert scaling.resources_per_node == {"CPU": 4, "GPU": 2}


def test_address_that_gloo_cannot_use_is_refused_by_name():
    assert interface_of(HERE) == "lo"
    with pytest.raises(ClusterError, match=r"has the IPv4 address 203\.0\.113\.1"):
        interface_of("203.0.113.1")


@pytest.fixture
def leader(monkeypatch):
    """Returns the address of a first process that waits for two followers, and what it gets."""
    monkeypatch.setattr(gang_connections, "_PROOF_LIMIT_S", 1)
    listener, taken = socket.create_server((HERE, 0)), queue.SimpleQueue[Any]()
    address = listener.getsockname()

    def wait():
        taken.put(accept(listener, SECRET, "w1", [1, 2], PATIENCE_S))

    threading.Thread(target=wait, daemon=True).start()
    return address, taken


def says(*words):
    def attack(address):
        with socket.create_connection(address) as stranger:
            for word in words:
                stranger.sendall(word)

    return attack


def message(content):
    return struct.pack("!i", len(content)) + content


def echoes(address):
    """Sends back what it gets, so that the leader's own proof would be the answer."""
    with socket.create_connection(address) as stranger:
        while word := stranger.recv(1024):
            stranger.sendall(word)


def of_another_worker(address):
    with pytest.raises((EOFError, OSError)):
        connect(address, SECRET, "w2", 1)


def of_another_run(address):
    with pytest.raises((EOFError, OSError)):
        connect(address, bytes(31) + b"1", "w1", 1)


ATTACKS = [
    *(echoes, of_another_worker, of_another_run),
    says(b""),
    says(os.urandom(4096)),
    says(message(bytes(32)), message(bytes(32)), message(bytes(4096))),
    says(struct.pack("!i", -1) + struct.pack("!Q", 1 << 62)),
    says(message(bytes(1 << 20))),
]


def test_strangers_are_refused_and_followers_are_taken(leader):
    address, taken = leader
    held = [socket.create_connection(address) for _ in range(300)]  # who say nothing
    for attack in ATTACKS:
        attack(address)
    second, first = (connect(address, SECRET, "w1", number) for number in (2, 1))
    accepted = taken.get(timeout=PATIENCE_S)
    for connection, (other, _) in zip(accepted, (first, second), strict=True):
        other.send("hello")
        assert connection.recv() == "hello"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address)
    for stranger in held:
        stranger.close()


def test_connections_block_whatever_user_code_has_as_default_timeout(leader, monkeypatch):
    address, taken = leader
    monkeypatch.setattr(gang_connections, "_PROOF_LIMIT_S", 5)
    socket.setdefaulttimeout(20)
    try:
        made = [connect(address, SECRET, "w1", number) for number in (1, 2)]
        accepted = taken.get(timeout=PATIENCE_S)
        ends = [*accepted, *(one for pair in made for one in pair)]
        assert all(os.get_blocking(one.fileno()) for one in ends)
    finally:
        socket.setdefaulttimeout(None)


def test_follower_that_does_not_come_is_named():
    told = r"processes \[3, 4\] of this worker, on other nodes, have not connected to 127"
    with pytest.raises(ClusterError, match=told):
        accept(socket.create_server((HERE, 0)), SECRET, "w1", [2, 3], 0.3)


def test_stranger_in_place_of_the_first_process_is_refused():
    """One that sends back what it hears, so that the follower's own proof would be its answer."""
    with socket.create_server((HERE, 0)) as listener:

        def echo():
            stranger, _ = listener.accept()
            with stranger, contextlib.suppress(OSError):
                while word := stranger.recv(1024):
                    stranger.sendall(word)

        threading.Thread(target=echo).start()
        with pytest.raises(ConnectionError, match="does not hold the secret"):
            connect(listener.getsockname(), SECRET, "w1", 1)


def test_values_and_sums_of_the_store_are_those_of_all_processes():
    ours, theirs = zip(*(Pipe() for _ in range(2)), strict=True)
    leader, followers = (
        LeaderControl(),
        [FollowerControl(end, n) for n, end in enumerate(theirs, 1)],
    )
    leader.lead(ours, *4 * [lambda *_: None])
    for follower in followers:
        follower.follow(lambda records: None)
    stores = [leader.store, *(follower.store for follower in followers)]
    seen = [dist.PrefixStore("a", store) for store in stores]  # as torch's groups do
    threads = [threading.Thread(target=store.add, args=("n", 1)) for store in 50 * seen]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen[2].add("n", 0) == 150
    for store, (one, other) in zip(seen, itertools.pairwise([*seen, seen[0]]), strict=True):
        one.set(f"key of {id(store)}", "value")
        assert other.get(f"key of {id(store)}") == b"value"
    leader._may_end = True
