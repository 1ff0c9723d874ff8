"""A member that dies while the others only wait for their devices."""

import multiprocessing
import threading

import pytest
import torch
import torch.distributed as dist

from elastic_dp.device.accelerator import install
from elastic_dp.distributed.process_group import connect_devices
from elastic_dp.errors import CollectiveFailed
from tests.distributed.meeting import OverTcp, form
from tests.distributed.members import of_each_on_devices as of_each
from tests.distributed.members import transport_of
from tests.distributed.test_device_transport import switch
from tests.kit.simulated_device import SimulatedAccelerator
from tests.patience import PATIENCE_S, eventually


def member(rank, port):
    """With its device in use."""
    install(SimulatedAccelerator())
    meet = OverTcp(port)
    group = form(meet, rank, 2)
    connect_devices(group, meet, 1, PATIENCE_S)
    switch(group)
    return group


def dies(port):
    member(1, port)
    threading.Event().wait()


def test_peer_that_dies_while_the_host_waits_for_its_device_is_noticed_at_once():
    """Without a controller, and although the communicator reports nothing."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    peer = multiprocessing.get_context("forkserver").Process(target=dies, args=(store.port,))
    peer.start()
    try:
        group = member(0, store.port)
        transport, output = transport_of(group), torch.ones(2)
        transport.wait(transport.all_gather(output, torch.ones(1)))
        otherwise = threading.Timer(PATIENCE_S, group.abort)
        otherwise.start()
        peer.kill()
        with pytest.raises(CollectiveFailed, match="by peer"):
            transport.read([output])
        otherwise.cancel()
        transport.come_to_rest()
    finally:
        peer.kill()
        peer.join()
        install(None)


def watching():
    return [thread for thread in threading.enumerate() if thread.name == "peer-watch"]


def test_peers_that_leave_say_goodbye_so_that_no_thread_keeps_the_group():
    def act(group):
        switch(group)
        found = len(watching())
        group.gather_bytes(b"")
        return found

    assert max(of_each(3, act, generations=2)) >= 1
    eventually(lambda: not watching())
