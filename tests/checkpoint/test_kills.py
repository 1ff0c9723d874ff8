"""Whatever instant a writer dies at: what was committed last loads in every bit, nothing half is
seen, leftovers go.

A writer checkpoints two steps and keeps one. On a disk it is killed, really, at every write, flush,
link and deletion of the second step; elsewhere the call and all later ones fail, since a dead
process asks for nothing more.
"""

import os
import signal
import threading

import pytest
import torch

from elastic_dp.checkpoint.catalog import Catalog, CommitName, Keep
from elastic_dp.checkpoint.checkpoint_reader import load_newest, verify
from elastic_dp.storage import Store
from tests.checkpoint.sharded_states import sharded_checkpoint, whole_state
from tests.checkpoint.states import big_tree, checkpoint, memory_store, same
from tests.storage.conftest import bucket  # noqa: F401
from tests.storage.servers import s3_options

STATES = {step: big_tree(1 << 20, seed=step) for step in (1, 2, 3)}
SHARDED = {step: whole_state(step) for step in (1, 2, 3)}
NEVER = 10**6


class Dead(BaseException):
    pass


class Countdown:
    """`die` at the n-th call, from whatever thread."""

    def __init__(self, left, die):
        self.left, self._die, self._lock = left, die, threading.Lock()

    def __call__(self):
        with self._lock:
            self.left -= 1
            if self.left <= 0:
                self._die()

    def around(self, call):
        def wrapped(*args, **kwargs):
            self()
            result = call(*args, **kwargs)
            self()
            return result

        return wrapped


def raise_dead():
    raise Dead


def kill_myself():
    os.kill(os.getpid(), signal.SIGKILL)


def write(catalog, step, states, **how):
    """Checkpoint it as a group does whose members have everything, or a part of the optimizer."""
    made = sharded_checkpoint if states is SHARDED else checkpoint
    made(catalog, step, states[step], **how)


def second_step(store, countdown, *, disk=False, states=STATES):
    """Checkpoint step 2 and delete step 1, dying on the way. Returns how many calls were made."""
    before = countdown.left
    backend = store._backend
    for name in ("write", "delete"):
        setattr(backend, name, countdown.around(getattr(backend, name)))
    for name in ("fsync", "link", "replace", "unlink") if disk else ():
        setattr(os, name, countdown.around(getattr(os, name)))
    catalog = Catalog(store)
    write(catalog, 2, states, workers=2)
    catalog.retain(Keep(1), 1)
    return before - countdown.left


def in_a_process(call):
    """Return its exit status as a signal's number, or what it returns if it is not killed."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            torch.set_num_threads(1)  # its threads did not come along
            os.write(writer, str(call()).encode())
        finally:  # never back into the test
            os._exit(0)
    os.close(writer)
    with open(reader) as file:
        said = file.read()
    status = os.waitpid(pid, 0)[1]
    return int(said) if status == 0 else -os.WTERMSIG(status)


def check_and_go_on(store, states=STATES):
    """After a death: step 1 or step 2 is there, whole, and a new writer finds nothing in its
    way."""
    catalog = Catalog(store)
    names = catalog.names()
    assert names in ([CommitName(1, 1)], [CommitName(1, 1), CommitName(2, 1)], [CommitName(2, 1)])
    for name in names:
        assert verify(catalog, name) == [] and same(
            load_newest(catalog, name.step, on_damage=pytest.fail)[1], states[name.step]
        )
    catalog.claim(2, names[-1])
    write(catalog, 3, states, fence=2)
    catalog.retain(Keep(1), 2)
    left = [
        entry.path[len(catalog.folder) + 1 :] for entry in catalog.store.find(f"{catalog.folder}/")
    ]
    folders = {path.partition("/")[0] for path in left}
    assert folders == {"seals", "step-000000000003"}, left
    assert sum(path.endswith(".json") and "/step-" in path for path in left) == 1
    assert not [path for path in left if path.endswith(".tmp")]
    return names[-1].step


def first_step(store, states=STATES):
    catalog = Catalog(store)
    catalog.claim(1, None)
    write(catalog, 1, states)


def test_killed_on_a_disk(tmp_path):
    def prepared(n):
        store = Store(str(tmp_path / str(n)))
        first_step(store)
        return store

    store = prepared(0)
    calls = in_a_process(lambda: second_step(store, Countdown(NEVER, kill_myself), disk=True))
    assert calls >= 30
    found = []
    for at in range(1, calls + 1):
        store = prepared(at)
        countdown = Countdown(at, kill_myself)
        status = in_a_process(lambda s=store, c=countdown: second_step(s, c, disk=True))
        assert status == -signal.SIGKILL
        found.append(check_and_go_on(Store(str(tmp_path / str(at)))))
    assert set(found) == {1, 2}
    commit_at = found.index(2)
    assert found[commit_at:] == [2] * (calls - commit_at), "a checkpoint was lost again"


@pytest.mark.parametrize("states", [STATES, SHARDED], ids=["replicated", "sharded"])
def test_dead_in_memory(states):
    def prepared():
        store = memory_store()
        first_step(store, states)
        return store

    calls = second_step(prepared(), Countdown(NEVER, raise_dead), states=states)
    for at in range(1, calls + 1):
        store = prepared()
        with pytest.raises(Dead):
            second_step(store, Countdown(at, raise_dead), states=states)
        check_and_go_on(Store(store._url), states)


def test_dead_on_s3(bucket):  # noqa: F811
    endpoint, name = bucket

    def opened(at):
        return Store(f"s3://{name}/{at}", s3_options(endpoint))

    first_step(opened(0))
    calls = second_step(opened(0), Countdown(NEVER, raise_dead))
    for at in range(
        1, calls + 1, 2
    ):  # before the request and after its answer are the same to the store
        first_step(opened(at))
        with pytest.raises(Dead):
            second_step(opened(at), Countdown(at, raise_dead))
        check_and_go_on(opened(at))
