"""Starts the processes of a worker beside its actor, as children of it.

They are on its node and use its resources. Each has one connection, to the actor, and ends when
that closes.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from multiprocessing.connection import Connection
from typing import Any

from elastic_dp.cluster.followers.follower import follow
from elastic_dp.cluster.worker_logs import print_whatever_fits
from elastic_dp.coordinator.messages import WorkerId

_MAIN = "from elastic_dp.cluster.followers.child_processes import main; main()"


def start_followers(identity: WorkerId, processes: int, *given: Any) -> list[Connection]:
    """Return the connections to them, for the first of so many processes of a worker. `given` are
    the further arguments of `follow`."""
    found = []
    for number in range(1, processes):
        ours, theirs = socket.socketpair()
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with theirs:
            subprocess.Popen(
                [sys.executable, "-c", _MAIN, str(theirs.fileno())],
                env=environment,
                pass_fds=[theirs.fileno()],
            )
        connection = Connection(ours.detach())
        connection.send((identity, number, given))
        found.append(connection)
    return found


def main() -> None:
    """Run one of them. Its argument is the descriptor of its connection."""
    print_whatever_fits()
    leader = Connection(int(sys.argv[1]))
    identity, number, given = leader.recv()
    follow(identity, number, leader, *given)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # abandoned groups may block an orderly exit
