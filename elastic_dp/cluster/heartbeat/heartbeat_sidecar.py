"""The heartbeat sidecar of a worker: a small process that does not depend on the worker's Python.

It runs as a script with only the standard library, so it starts in milliseconds. It reads the
worker's position from shared memory, sends it as a datagram, and writes down when the controller
answered, which is the worker's lease. It is silent while the worker, or another process of it, is
stopped (SIGSTOP), and ends with it. When a worker's identity is no longer known, the sidecar kills
the worker, even if that is frozen or holds the GIL. Before it kills a stuck worker, it sends the
stack traces of its threads, which `faulthandler` writes on SIGUSR2 without the GIL.

It also reports the worker's death. A killed process first gives back its memory, which takes tens
of milliseconds, and closes its sockets only then, so its peers and Ray learn of it late. Linux
sends PR_SET_PDEATHSIG at the beginning of that, and once all threads are exiting, none of them will
run its own code again.

The report has what no other process knows: which micro-batch the worker ran, whether the kernel has
killed a process since because memory ran out, the fault of its device that the worker wrote down
before it ended, and the worker's last output (if that is a file, which this process shares).

Every datagram is authenticated before it is parsed: `MAC (16 bytes) | counter (8 bytes) | JSON`,
with keyed BLAKE2b as the MAC. The key of each direction is derived from the run's secret, which is
never sent, and the nonce of the controller's socket, which workers receive with its address. So a
datagram that was recorded under an earlier controller is refused, and one that was recorded under
this controller is refused by its counter.
"""

import contextlib
import ctypes
import hashlib
import hmac
import json
import math
import mmap
import os
import select
import signal
import socket
import stat
import struct
import sys
import time


class Page(ctypes.Structure):
    """The memory that the worker and the sidecar share. Each field has one writer.

    The sidecar writes `renewed_at`, the sending time of the last answered heartbeat, of
    CLOCK_MONOTONIC, which all processes of a host share. The worker writes the rest.
    """

    _fields_ = [
        ("generation", ctypes.c_int64),
        ("step", ctypes.c_int64),
        ("phase", ctypes.c_char * 16),  # "data 7", "compute 7" while virtual worker 7 runs
        ("virtual_s", ctypes.c_double),  # seconds per virtual worker
        ("renewed_at", ctypes.c_double),
        # "host port nonce"; read for each heartbeat, because a controller that takes over has
        # another one
        ("controller", ctypes.c_char * 128),
        ("fault_kind", ctypes.c_char * 16),  # of the worker's device, if it has failed
        ("fault_text", ctypes.c_char * 1024),
        ("times", ctypes.c_double * 9),  # `telemetry.phase_clock.PhaseClock.state`
        ("store_retries", ctypes.c_int64),
        ("sending_s", ctypes.c_double),  # `distributed.link_times`
        ("evaluations", ctypes.c_int64),  # `packed_evaluations`, which are written at once
    ]

    def controller_address(self) -> tuple[str, int, bytes]:
        """Return host, port and nonce of the controller's socket. Raises ValueError while they are
        being written.
        """
        host, port, nonce = self.controller.split(b" ")
        return host.decode(), int(port), bytes.fromhex(nonce.decode())

    def fault(self) -> tuple[str, str] | None:
        """Return the kind and the text of the fault."""
        kind, text = self.fault_kind, self.fault_text
        return (kind.decode(), text.decode(errors="ignore")) if kind else None

    def times_until(self, now: float) -> list[float]:
        """Return the seconds up to `now` by what the worker did."""
        state, before = list(self.times), None
        while state != before:  # it was being written
            before, state = state, list(self.times)
        *seconds, index, since = state
        if index >= 0:
            seconds[int(index)] += max(0.0, now - since)
        return [round(each, 4) for each in seconds]


_MAX_COUNT = (1 << 16) - 1  # of evaluations in a body


def packed_evaluations(body: int, count: int, ended: bool) -> int:
    """Return the arguments of `HeartbeatStatus.write_evaluations` as one number."""
    return body << 17 | min(count, _MAX_COUNT) << 1 | ended


def unpacked_evaluations(number: int) -> tuple[int, int, bool]:
    """Return the arguments of `packed_evaluations`."""
    return number >> 17, number >> 1 & _MAX_COUNT, bool(number & 1)


_MAC_BYTES = 16
_COUNTER = struct.Struct(">Q")
_WINDOW = 64  # datagrams may be out of order by so many
MAX_DATAGRAM_BYTES = 65507  # the limit of UDP


class Channel:
    """One direction between the controller and one worker, or all of them: signs and authenticates
    messages.
    """

    def __init__(self, secret: bytes, nonce: bytes, receiver: str) -> None:
        """`receiver` is a worker, or "" for the controller; each has a key of its own."""
        purpose = b"elastic_dp heartbeats to " + receiver.encode() + b"\0" + nonce
        self._key = hashlib.blake2b(purpose, key=secret, digest_size=32).digest()

    def sign(self, counter: int, message: dict[str, object]) -> bytes:
        payload = _COUNTER.pack(counter) + json.dumps(message, ensure_ascii=False).encode(
            errors="replace"
        )
        return self._mac(payload) + payload

    def open(self, datagram: bytes) -> tuple[int, dict[str, object]] | None:
        """Return the counter and the message, or None if the datagram was not signed with this key.

        Nothing is parsed before that is known.
        """
        payload = datagram[_MAC_BYTES:]
        if len(payload) < _COUNTER.size or not hmac.compare_digest(
            self._mac(payload), datagram[:_MAC_BYTES]
        ):
            return None
        message = json.loads(payload[_COUNTER.size :])
        return _COUNTER.unpack_from(payload)[0], message

    def _mac(self, payload: bytes) -> bytes:
        return hashlib.blake2b(payload, key=self._key, digest_size=_MAC_BYTES).digest()


class Replays:
    """Accepts each counter of one sender once, also if they are slightly out of order (RFC 4303,
    3.4.3).
    """

    def __init__(self) -> None:
        self._newest, self._seen = 0, 0  # bit i of `_seen`: newest - i was accepted

    def is_new(self, counter: int) -> bool:
        ahead = counter - self._newest
        if ahead > 0:
            self._newest = counter
            self._seen = (self._seen << min(ahead, _WINDOW) | 1) & (1 << _WINDOW) - 1
            return True
        if -ahead >= _WINDOW or self._seen >> -ahead & 1:
            return False
        self._seen |= 1 << -ahead
        return True


class _ControllerConnection:
    """The socket to the controller at its present address; it receives from no other address."""

    def __init__(self, page: Page, worker: str, secret: bytes) -> None:
        self._page, self._worker, self._secret = page, worker, secret
        self._address: tuple[str, int, bytes] | None = None
        self._sent = 0
        self.socket: socket.socket | None = None

    def send(self, message: dict[str, object]) -> None:
        """Send a message. Errors are ignored: a datagram may be lost anyway."""
        with contextlib.suppress(OSError, ValueError):  # the address is being changed
            address = self._page.controller_address()
            if address != self._address:
                self._connect(address)
            assert self.socket is not None
            self._sent += 1
            self.socket.send(self._out.sign(self._sent, {"worker": self._worker} | message))

    def receive(self) -> dict[str, object] | None:
        """Return a message of the controller, or None if the datagram is not from it."""
        assert self.socket is not None
        try:
            opened = self._in.open(self.socket.recv(MAX_DATAGRAM_BYTES))
        except (OSError, ValueError):
            return None
        return opened[1] if opened is not None and isinstance(opened[1], dict) else None

    def _connect(self, address: tuple[str, int, bytes]) -> None:
        host, port, nonce = address
        if self.socket is not None:
            self.socket.close()
            self.socket, self._address = None, None
        made = socket.socket(family_of(host), socket.SOCK_DGRAM)
        made.setblocking(False)
        made.connect((host, port))
        self._out = Channel(self._secret, nonce, "")
        self._in = Channel(self._secret, nonce, self._worker)
        self.socket, self._address = made, address


def family_of(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


_PR_SET_PDEATHSIG = 1
_PF_EXITING = 4
_STATE, _FLAGS, _UTIME, _STIME = 0, 6, 11, 12  # fields of /proc/…/stat after the command's name
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# In one datagram; the oldest threads, the training thread among them, come last.
_MAX_STACKS_BYTES = 16384
_STACKS_S = 1.5  # for all of them
_STILL_S = 0.2  # after this time without a further byte nothing is missing


def _look_at_all(pids: list[int]) -> tuple[bool, float]:
    """Return (one of them stopped or dead, processor time used by all)."""
    looks = [_look_at(pid) for pid in pids]
    return any(stopped for stopped, _ in looks), sum(used_s for _, used_s in looks)


def _look_at(pid: int) -> tuple[bool, float]:
    """Return (stopped or dead, processor time used), from Linux. Elsewhere a worker always counts
    as running.
    """
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            words = file.read().rpartition(")")[2].split()
    except OSError:
        return False, 0.0
    return words[_STATE] in "TtZX", (int(words[_UTIME]) + int(words[_STIME])) / _TICKS_PER_S


def _take_stacks(pid: int, file: int) -> str:
    """Return the stack traces of all threads, as far as they are written in time."""
    os.kill(pid, signal.SIGUSR2)
    size, grew_at = 0, math.inf
    until = time.monotonic() + _STACKS_S
    while time.monotonic() < min(until, grew_at + _STILL_S):
        time.sleep(0.02)
        before, size = size, os.fstat(file).st_size
        if size > before:
            grew_at = time.monotonic()
    start = max(0, size - _MAX_STACKS_BYTES)
    return os.pread(file, _MAX_STACKS_BYTES, start).decode(errors="replace")


def _tell_when_parent_exits() -> int:
    """Return a file descriptor that becomes readable when the thread that started us exits. Linux
    only.
    """
    read, write = os.pipe()
    os.set_blocking(read, False)
    os.set_blocking(write, False)
    signal.signal(signal.SIGUSR1, lambda *_: None)
    signal.set_wakeup_fd(write)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGUSR1))
    return read


def _is_exiting(pid: int) -> bool:
    """Return whether no thread of the process will run its own code again."""
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/stat", encoding="utf-8", errors="replace") as file:
                words = file.read().rpartition(")")[2].split()
            if not int(words[_FLAGS]) & _PF_EXITING and words[_STATE] not in "ZX":
                return False
    except OSError:  # a task, or all of it, vanished while we looked
        return not os.path.exists(f"/proc/{pid}")
    return True


def oom_kills(root: str = "/sys/fs/cgroup", groups: str = "/proc/self/cgroup") -> int:
    """Return how many processes of our cgroup (version 2 or 1) the kernel has killed because memory
    ran out.

    Linux only.
    """
    with contextlib.suppress(OSError, ValueError):
        with open(groups, encoding="utf-8") as file:
            lines = [line.strip().split(":", 2) for line in file]
        for _, controllers, group in sorted(lines, key=lambda line: line[1] != "memory"):
            events = {
                "": f"{root}{group}/memory.events",
                "memory": f"{root}/memory{group}/memory.oom_control",
            }
            with (
                contextlib.suppress(OSError),
                open(events.get(controllers, ""), encoding="utf-8") as file,
            ):
                counts = dict(line.split() for line in file)
                return int(counts.get("oom_kill", 0))
    return 0


def log_tail(limit: int = 3000) -> str:
    """Return the end of what was printed to standard output and error; empty if they are no
    files.
    """
    seen, words = set(), []
    for fd in (1, 2):
        with contextlib.suppress(OSError), open(f"/proc/self/fd/{fd}", "rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            if stat.S_ISREG(status.st_mode) and status.st_ino not in seen:
                seen.add(status.st_ino)
                file.seek(max(0, status.st_size - limit))
                words.append(file.read(limit).decode(errors="replace"))
    return "\n".join(words)


def main(page_file: str, stacks_file: str, worker: str, interval_s: str, *pids: str) -> None:
    """Run the sidecar. The files are inherited descriptors; the run's secret is read from standard
    input. `pids`: of the worker's processes, the parent first.
    """
    processes = [int(pid) for pid in pids]
    parent = processes[0]  # not getppid(): the worker may be gone already
    interval = float(interval_s)
    page = Page.from_buffer(mmap.mmap(int(page_file), ctypes.sizeof(Page)))
    stacks = int(stacks_file)
    controller = _ControllerConnection(page, worker, sys.stdin.buffer.read())

    def report_death() -> None:
        gone = {"exits": True, "step": page.step, "phase": page.phase.decode()}
        gone |= {"fault": page.fault(), "out_of_memory": oom_kills() > killed_before}
        controller.send(gone)
        controller.send({"words": log_tail()})

    killed_before = oom_kills()
    due = time.monotonic()
    exits = _tell_when_parent_exits()
    while os.getppid() == parent:
        now = time.monotonic()
        if now >= due:
            due = now + interval
            is_stopped, cpu_s = _look_at_all(processes)
            if not is_stopped:
                beat = {
                    "generation": page.generation,
                    "step": page.step,
                    "phase": page.phase.decode().partition(" ")[0],
                    "at": now,
                    "cpu_s": cpu_s,
                    "virtual_s": page.virtual_s,
                    "times": page.times_until(now),
                    "store_retries": page.store_retries,
                    "sending_s": page.sending_s,
                    "evaluations": page.evaluations,
                }
                controller.send(beat)
        inputs: list[socket.socket | int] = [exits]
        if controller.socket is not None:
            inputs.append(controller.socket)
        ready = select.select(inputs, [], [], max(0.0, due - time.monotonic()))[0]
        if exits in ready:
            os.read(exits, 64)
            for _ in range(20):  # all threads follow the first within a few milliseconds
                if _is_exiting(parent):
                    return report_death()
                time.sleep(0.001)
        answer = controller.receive() if controller.socket in ready else None
        if answer is None:
            continue
        if answer.get("die"):
            if answer.get("stuck"):
                controller.send({"stacks": _take_stacks(parent, stacks)})
            os.kill(parent, signal.SIGKILL)
        elif isinstance(at := answer.get("at"), float):
            page.renewed_at = max(at, page.renewed_at)
    report_death()  # on a busy machine it took longer than the loop above


if __name__ == "__main__":
    main(*sys.argv[1:])
