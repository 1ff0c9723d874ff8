"""Garbage for the ports of a run, sent by a process of its own:

    send({"tcp": [(host, port), …], "udp": [(host, port), …], "connections": n, "datagrams": n,
    "nonce": hex, "secret": hex, "seed": n})

`connections`: to each port. `datagrams`: to all of them together. `secret`: that of another run,
which signs some of them.
"""

import contextlib
import random
import socket

from elastic_dp.cluster.heartbeat import heartbeat_sidecar

HOSTILE = [b"[" * 4000, b"[]", b"{}", b"", b"null", b"\xff" * 100, b"[" * 60000]
_OPEN = 200  # connections at once


def datagrams(asked, rng):
    """Signed by another run, or with something changed, or noise."""
    channel = heartbeat_sidecar.Channel(
        bytes.fromhex(asked["secret"]), bytes.fromhex(asked["nonce"]), "w1"
    )
    messages = [{"worker": "w1", "exits": True}, {"worker": "w1", "die": True}, {"at": 1e12}]
    for counter in range(1000):
        signed = channel.sign(counter, rng.choice(messages))
        at = rng.randrange(len(signed))
        yield from (signed, signed[:at] + rng.randbytes(1) + signed[at + 1 :], signed[:at])
        yield from (rng.choice(HOSTILE), rng.randbytes(at))


def greetings(rng):
    """First bytes of a connection: those of a Gloo pair, of a TCPStore's client, or noise."""
    made = [b"", b"GET / HTTP/1.1\r\n\r\n", b"[" * 4000]
    made += [pair.to_bytes(8, "little") + bytes(64) for pair in range(64)]
    made += [b"\x00" + rng.randbytes(4) + b"\1" + bytes(7) + rng.randbytes(8) for _ in range(50)]
    return made + [rng.randbytes(rng.randrange(300)) for _ in range(100)]


def connect_often(address, times, greeting, rng):
    """Not waiting for one that is not answered."""
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    opened = []
    for _ in range(times):
        one = socket.socket(family, socket.SOCK_STREAM)
        one.setblocking(False)
        with contextlib.suppress(OSError):
            one.connect_ex(tuple(address))
            one.send(rng.choice(greeting))
        opened.append(one)
        if len(opened) > _OPEN:
            opened.pop(rng.randrange(len(opened))).close()
    for one in opened:
        one.close()


def send(asked):
    rng = random.Random(asked["seed"])
    greeting, made = greetings(rng), [*datagrams(asked, rng)]
    for address in asked["tcp"]:
        connect_often(address, asked["connections"], greeting, rng)
    sent = 0
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        stranger.setblocking(False)
        while sent < asked["datagrams"]:
            for address in asked["udp"]:
                with contextlib.suppress(OSError):
                    stranger.sendto(rng.choice(made), tuple(address))
                sent += 1
