"""What the kernel knows of the connections of this process."""

import os
import socket
from multiprocessing import Pipe

import pytest

from elastic_dp.distributed.link_times import connections, sending_s


def test_connections_of_this_process_are_found_and_stay_usable():
    before = connections()
    with socket.create_server(("127.0.0.1", 0)) as server:
        with socket.create_connection(server.getsockname()) as one, server.accept()[0] as other:
            ours = dict(connections().items() - before.items())
            numbers = {one.fileno(): False, other.fileno(): False}  # the server has no peer
            assert {number: leaves for (number, _), leaves in ours.items()} == numbers
            one.sendall(b"x" * 100_000)
            assert other.recv(100_000, socket.MSG_WAITALL) == b"x" * 100_000
            assert 0 <= sending_s(ours) < 1
        assert sending_s(ours) == 0, "closed"
    assert sending_s({}) == 0


@pytest.fixture
def default_timeout():
    """As user code may set it, for all sockets of its process."""
    socket.setdefaulttimeout(20)
    yield
    socket.setdefaulttimeout(None)


@pytest.mark.usefixtures("default_timeout")
def test_sockets_of_others_still_block_after_a_look_at_them():
    ours, theirs = Pipe()
    with ours, theirs, socket.create_server(("127.0.0.1", 0)) as server:
        before = connections()
        with socket.create_connection(server.getsockname()), server.accept()[0] as other:
            os.set_blocking(other.fileno(), True)
            sending_s(dict(connections().items() - before.items()))
            assert [os.get_blocking(each.fileno()) for each in (ours, theirs, other)] == [True] * 3
