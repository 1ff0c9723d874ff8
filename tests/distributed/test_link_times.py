"""What the kernel knows of the connections of this process."""

import socket

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
