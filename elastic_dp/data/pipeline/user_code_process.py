"""A process next to the worker that runs user code which draws from global generators, one call at
a time.

It starts with a fresh interpreter (it is never forked, since the worker has threads) that does not
import the user's main module, so scripts need no `if __name__ == "__main__"`. The code is sent
once, by cloudpickle. Arrays and tensors are sent outside of the pickle, through a socket, into
memory that the receiver owns: the kernel copies twice, and there is no shared memory that could run
out or be left behind. The process ends when the socket closes, so it never outlives the worker.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import queue
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import cloudpickle
import torch

from elastic_dp.data.pipeline.array_memory import empty_bytes
from elastic_dp.errors import ClusterError, DataError, ElasticError
from elastic_dp.threads import background
from elastic_dp.torch_settings import apply_torch_settings, torch_settings

_SOCKET_BYTES = 4 << 20
_LEAVE_S = 5.0  # time to leave after `end`
_START = (
    "import sys; from elastic_dp.data.pipeline.user_code_process import serve; "
    "serve(int(sys.argv[1]), sys.argv[2])"
)


class UserCodeProcess:
    """`start` starts it. `run` calls the callable there; an exception in it is raised here."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._popen: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        return None if self._popen is None else self._popen.pid

    def start(self, pickled: bytes) -> None:
        """`pickled`: the callable. Returns at once, before the process has imported anything."""
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setblocking(True)  # whatever user code has as `socket.setdefaulttimeout`
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                end.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BYTES)
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            "OMP_NUM_THREADS": "1",
        }
        settings = json.dumps(torch_settings())
        with theirs:
            self._popen = subprocess.Popen(
                [sys.executable, "-c", _START, str(theirs.fileno()), settings],
                pass_fds=[theirs.fileno()],
                env=environment,
                stdin=subprocess.DEVNULL,
            )
        self._socket = ours
        self._first: bytes | None = pickled

    def run(self, *arguments: Any) -> Any:
        try:
            if self._first is not None:
                _send(self._socket, self._first)
                self._first = None
            _send(self._socket, arguments)
            fine, answer = _receive(self._socket)
        except (OSError, EOFError) as error:
            raise self._death() from error
        if not fine:
            raise answer
        return answer

    def end(self) -> None:
        """Ends the process, also in a call of another thread. It is killed if it does not leave."""
        if self._popen is None:
            return
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        try:
            self._popen.wait(_LEAVE_S)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()

    def close(self) -> None:
        """Ends the process. No thread may be in a call, since another file may get the descriptor
        of the socket."""
        if self._popen is not None:
            self.end()
            self._socket.close()
            self._popen = None

    def _death(self) -> ClusterError:
        assert self._popen is not None
        try:
            code = self._popen.wait(_LEAVE_S)
        except subprocess.TimeoutExpired:
            return ClusterError(f"{self._name} (pid {self.pid}) closed its socket")
        if code >= 0:
            return ClusterError(
                f"{self._name} (pid {self.pid}) ended with exit code {code}; its output says why"
            )
        return ClusterError(
            f"{self._name} (pid {self.pid}) was killed by {signal.Signals(-code).name}, "
            "perhaps for the memory "
            "that it took; lower DataConfig.workers or MapStyleData.workers, or give the "
            "node more memory"
        )


def serve(descriptor: int, settings: str) -> None:
    """The main function of the process. It ends when the other end of the socket closes, even
    during a call. `settings`: of torch, in the worker."""
    torch.set_num_threads(1)
    apply_torch_settings(json.loads(settings))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the worker
    connection = socket.socket(fileno=descriptor)
    calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
    background("listen", partial(_listen, connection, calls), lambda _: os._exit(1)).start()
    function: Callable[..., Any] | None = None
    failure: Exception | None = None
    try:
        function = pickle.loads(calls.get())
    except Exception as error:  # the user's modules may raise anything; the first call reports it
        failure = error
    try:
        while True:
            answer = _answer(function, calls.get(), failure)
            try:
                _send(connection, answer)
            except OSError:
                raise
            except Exception as error:  # what user code made raises when it is pickled
                _send(connection, (False, _refused(error)))
    except OSError:  # the worker is gone
        os._exit(0)


def _refused(error: Exception) -> DataError:
    return DataError(
        f"a micro-batch cannot be sent from a data process: {type(error).__name__}: {error}; "
        "return tensors, arrays, texts and numbers, or leave out DataConfig.workers or "
        "MapStyleData.workers"
    )


def _listen(connection: socket.socket, calls: queue.SimpleQueue[Any]) -> None:
    try:
        while True:
            calls.put(_receive(connection))
    except (OSError, EOFError):
        os._exit(0)


def _answer(function: Any, arguments: Any, failure: Exception | None) -> tuple[bool, Any]:
    if failure is not None:
        return False, ClusterError(
            f"a data process cannot load the code to run: {type(failure).__name__}: {failure}"
        )
    try:
        return True, function(*arguments)
    except ElasticError as error:
        return False, error
    except Exception as error:  # not from user code, whose errors are caught before
        return False, ClusterError(f"a data process failed: {type(error).__name__}: {error}")


# ---------------------------------------------------------------------------------------- messages


class _Pickler(cloudpickle.Pickler):
    """Sends the memory of tensors outside of the pickle, as NumPy does for arrays."""

    def reducer_override(self, item: Any) -> Any:
        if type(item) is torch.Tensor and _is_plain(item):
            content: Any = item.detach().reshape(-1).view(torch.uint8).numpy()
            return _tensor, (pickle.PickleBuffer(content), item.dtype, tuple(item.shape))
        return super().reducer_override(item)


def _is_plain(tensor: torch.Tensor) -> bool:
    ours = tensor.device.type == "cpu" and tensor.layout == torch.strided
    return ours and tensor.is_contiguous() and not tensor.requires_grad and tensor.numel() > 0


def _tensor(content: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.frombuffer(content, dtype=dtype).reshape(shape)


def _send(connection: socket.socket, message: Any) -> None:
    """Sends the lengths, then the pickle, then each buffer."""
    buffers: list[pickle.PickleBuffer] = []
    pickled = io.BytesIO()
    _Pickler(pickled, protocol=5, buffer_callback=buffers.append).dump(message)
    pieces = [memoryview(pickled.getbuffer()), *(buffer.raw() for buffer in buffers)]
    lengths = [piece.nbytes for piece in pieces]
    head = struct.pack(f"<Q{len(lengths)}Q", len(lengths), *lengths)
    connection.sendall(head + pieces[0])
    for piece in pieces[1:]:
        connection.sendall(piece)


def _receive(connection: socket.socket) -> Any:
    (count,) = struct.unpack("<Q", _read(connection, 8))
    lengths = struct.unpack(f"<{count}Q", _read(connection, 8 * count))
    pickled, *buffers = [_read(connection, length) for length in lengths]
    return pickle.loads(pickled, buffers=buffers)


def _read(connection: socket.socket, length: int) -> memoryview:
    room: Any = empty_bytes(length)
    content = memoryview(room)
    got = 0
    while got < length:
        received = connection.recv_into(content[got:])
        if not received:
            raise EOFError
        got += received
    return content
