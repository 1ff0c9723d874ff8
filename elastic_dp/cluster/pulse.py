"""The heart of a worker: a small process beside it that needs nothing of the worker's Python.

Run as a script with only the standard library, so it starts in milliseconds. It reads where the worker stands
from shared memory, sends that as a datagram, and writes down when the controller answered, which is the worker's
lease. It stays silent while the worker is stopped (SIGSTOP) and ends with it. A worker whose identity is no longer
known is killed from here, also when it is frozen or holds the GIL.

Layout of the shared page: generation and step as int64, the phase as 16 bytes, the sending time of the last
answered heartbeat as float64 (CLOCK_MONOTONIC, which all processes of a host share).
"""

import contextlib
import json
import mmap
import os
import select
import signal
import socket
import struct
import sys
import time

PAGE = struct.Struct("<qq16sd")
_RENEWED_AT = struct.Struct("<d")
_RENEWED_AT_OFFSET = PAGE.size - _RENEWED_AT.size
WHERE = struct.Struct("<qq16s")


def read_renewed_at(page: mmap.mmap) -> float:
    return float(_RENEWED_AT.unpack_from(page, _RENEWED_AT_OFFSET)[0])


def write_renewed_at(page: mmap.mmap, at: float) -> None:
    _RENEWED_AT.pack_into(page, _RENEWED_AT_OFFSET, at)


def _is_stopped(pid: int) -> bool:
    """Stopped or dead, as Linux says it; elsewhere a worker always counts as running."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] in "TtZX"
    except OSError:
        return False


def main(
    path: str, host: str, port: str, worker: str, token: str, interval_s: str, parent_pid: str
) -> None:
    parent = int(parent_pid)  # not getppid(): the worker may be gone already
    interval = float(interval_s)
    with open(path, "r+b") as file:
        page = mmap.mmap(file.fileno(), PAGE.size)
    os.unlink(path)
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.setblocking(False)
    address = (host, int(port))
    due = time.monotonic()
    while os.getppid() == parent:
        now = time.monotonic()
        if now >= due:
            due = now + interval
            if not _is_stopped(parent):
                generation, step, phase = WHERE.unpack_from(page, 0)
                beat = {
                    "token": token,
                    "worker": worker,
                    "generation": generation,
                    "step": step,
                    "phase": phase.rstrip(b"\0").decode(),
                    "at": now,
                }
                with contextlib.suppress(OSError):
                    sock.sendto(json.dumps(beat).encode(), address)
        if not select.select([sock], [], [], max(0.0, due - time.monotonic()))[0]:
            continue
        with contextlib.suppress(OSError, ValueError):
            answer = json.loads(sock.recv(4096))
            if answer.get("token") != token:
                continue
            if answer.get("die"):
                os.kill(parent, signal.SIGKILL)
            else:
                write_renewed_at(page, max(answer["at"], read_renewed_at(page)))


if __name__ == "__main__":
    main(*sys.argv[1:])
