"""Ports for servers that tests start."""

from __future__ import annotations

import contextlib
import random
import socket


def free_port() -> int:
    """Below those that the system gives away: it is still free when somebody comes to it."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("", port))
            return port
