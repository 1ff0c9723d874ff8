"""What Ray's GCS stores for a run, so that its controller may die: the job, the claims of
generations, and the state.

The job is here and not among the actor's arguments: large arguments live in an object store that
dies with the driver, and then Ray could not restart the controller. With GCS fault tolerance all of
it survives the head node, too. A claim is an entry that is only ever created. Its value says which
controller created it, so claiming twice does no harm.
"""

from __future__ import annotations

import pickle
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from elastic_dp.cluster.ray import private
from elastic_dp.cluster.runs.controller_state import ControllerStateStore
from elastic_dp.run_record import RunRecord

if TYPE_CHECKING:  # they import torch, and the command line asks here who owns a cluster
    from elastic_dp.cluster.runs.run_history import StartRecord
    from elastic_dp.data import Index
    from elastic_dp.train.fault_injection import WorkerFault

_OWNED = b"elastic_dp/owned"
_CLAIMS = 8  # that are kept of a run; one would do
_PIECE = 16 << 20  # bytes; the GCS refuses messages of some hundred megabytes


@dataclass(frozen=True, slots=True)
class StoredJob:
    """What a controller needs to start, also one that Ray starts as a replacement."""

    pickled: bytes  # cloudpickle of (JobSpec, train function)
    index: Index | None  # of the data
    secret: bytes = field(repr=False)
    url: str  # the run's folder
    faults: tuple[WorkerFault, ...]
    record: RunRecord
    start: StartRecord


def store_job(run: str, job: StoredJob) -> None:
    whole = pickle.dumps(job)
    pieces = range(0, len(whole), _PIECE)
    for number, first in enumerate(pieces):
        private.kv_put(_key(run, f"job/{number}"), whole[first : first + _PIECE])
    private.kv_put(_key(run, "job"), str(len(pieces)).encode())


def load_job(run: str) -> StoredJob:
    count = int(_get(run, "job"))
    job = pickle.loads(b"".join(_get(run, f"job/{number}") for number in range(count)))
    assert isinstance(job, StoredJob)
    return job


def forget(run: str) -> None:
    """Delete the job and the state when the run is over.

    The newest claim stays: a controller that was frozen all the time must find it.
    """
    private.kv_delete(_key(run, "job"), is_prefix=True)
    private.kv_delete(_key(run, "facts/"), is_prefix=True)
    for earlier in _numbers(run, "generation/")[:-1]:
        private.kv_delete(_key(run, f"generation/{earlier}"))


def mark_owner() -> None:
    """Record that the cluster ends with this process, for processes that connect to it."""
    private.kv_put(_OWNED, b"")


def has_owner() -> bool:
    return private.kv_exists(_OWNED)


class RayKvStateStore(ControllerStateStore):
    """The state of the controller that leads the run now; its term begins when this is created."""

    def __init__(self, run: str) -> None:
        super().__init__()
        self._run, self._me = run, secrets.token_hex(8).encode()
        terms = _numbers(run, "facts/")
        if terms:
            self.state = pickle.loads(_get(run, f"facts/{terms[-1]}"))
            self.state.term = terms[-1] + 1
        self.save()
        for term in terms:
            private.kv_delete(_key(run, f"facts/{term}"))

    def claim(self, generation: int) -> bool:
        key = _key(self._run, f"generation/{generation}")
        taken = private.kv_put(key, self._me, overwrite=False)
        if taken and private.kv_get(key) != self._me:
            return False
        claimed = _numbers(self._run, "generation/")
        if claimed[-1] > generation:  # this one was deleted, because a successor is further
            return False
        if len(claimed) > 2 * _CLAIMS:
            for earlier in claimed[:-_CLAIMS]:
                private.kv_delete(_key(self._run, f"generation/{earlier}"))
        return True

    def highest_claimed(self) -> int:
        return max(_numbers(self._run, "generation/"), default=0)

    def _write(self, state: bytes) -> None:
        """Write the state. Each term has its own entry: a frozen predecessor writes where nobody
        reads any more.
        """
        private.kv_put(_key(self._run, f"facts/{self.state.term}"), state)


def _numbers(run: str, prefix: str) -> list[int]:
    keys = private.kv_list(_key(run, prefix))
    return sorted(int(key.rpartition(b"/")[2]) for key in keys)


def _get(run: str, name: str) -> bytes:
    found = private.kv_get(_key(run, name))
    assert found is not None, f"{name} of {run}"
    return found


def _key(run: str, name: str) -> bytes:
    return f"elastic_dp/{run}/{name}".encode()
