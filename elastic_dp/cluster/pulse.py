"""The heart of a worker: a small process beside it that needs nothing of the worker's Python.

Run as a script with only the standard library, so it starts in milliseconds. It reads where the worker stands
from shared memory, sends that as a datagram, and writes down when the controller answered, which is the worker's
lease. It stays silent while the worker is stopped (SIGSTOP) and ends with it. A worker whose identity is no longer
known is killed from here, also when it is frozen or holds the GIL.

It also brings the news of the worker's death. A killed process first gives back its memory, which takes tens of
milliseconds, and closes its sockets only then, so its peers and Ray learn of it late. Linux sends PR_SET_PDEATHSIG at the
beginning of that, and once all threads are exiting none of them will run any code of its own again.

Layout of the shared page: generation and step as int64, the phase as 16 bytes, the sending time of the last
answered heartbeat as float64 (CLOCK_MONOTONIC, which all processes of a host share).
"""

import contextlib
import ctypes
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


_PR_SET_PDEATHSIG = 1
_PF_EXITING = 4
_FLAGS, _STATE = 6, 0  # fields of /proc/…/stat after the command's name


def _tell_when_parent_exits() -> int:
    """A file descriptor that becomes readable when our parent's thread that started us exits; Linux only."""
    read, write = os.pipe()
    os.set_blocking(read, False)
    os.set_blocking(write, False)
    signal.signal(signal.SIGUSR1, lambda *_: None)
    signal.set_wakeup_fd(write)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGUSR1))
    return read


def _is_exiting(pid: int) -> bool:
    """Whether no thread of the process will run its own code again."""
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/stat", encoding="utf-8", errors="replace") as file:
                words = file.read().rpartition(")")[2].split()
            if not int(words[_FLAGS]) & _PF_EXITING and words[_STATE] not in "ZX":
                return False
    except OSError:  # a task, or all of it, vanished while we looked
        return not os.path.exists(f"/proc/{pid}")
    return True


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
    exits = _tell_when_parent_exits()
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
        inputs: list[socket.socket | int] = [sock, exits]
        ready = select.select(inputs, [], [], max(0.0, due - time.monotonic()))[0]
        if exits in ready:
            os.read(exits, 64)
            for _ in range(20):  # all threads follow the first within a few milliseconds
                if _is_exiting(parent):
                    gone = {"token": token, "worker": worker, "exits": True}
                    with contextlib.suppress(OSError):
                        sock.sendto(json.dumps(gone).encode(), address)
                    return
                time.sleep(0.001)
        if sock not in ready:
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
