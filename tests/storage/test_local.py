"""Files that go to the disk from where they lie in memory: the same bytes, whatever the file system thinks of it."""

import errno
import os

import numpy as np
import pytest

from elastic_dp.storage import Store
from elastic_dp.storage.local import PAGE_BYTES


def content(offset):
    """3 MiB and 5 bytes that begin so far behind a page."""
    room = np.random.default_rng(0).integers(0, 256, (3 << 20) + 5 + 2 * PAGE_BYTES, np.uint8)
    first = -room.ctypes.data % PAGE_BYTES + offset
    return memoryview(room)[first : first + (3 << 20) + 5]


@pytest.mark.parametrize("offset", [0, 1, 512])
@pytest.mark.parametrize("taken", [None, 0, PAGE_BYTES, 100], ids=str)
def test_all_bytes_are_there(tmp_path, monkeypatch, offset, taken):
    """`taken`: of the first direct write, then it is refused; None: whatever this file system does."""
    write, direct = os.write, []

    def writing(descriptor, rest):
        direct.append(len(rest))
        if taken is not None and (len(direct) > 1 or not taken):
            raise OSError(errno.EINVAL, "not here")
        return write(descriptor, rest if taken is None else rest[:taken])

    monkeypatch.setattr("elastic_dp.storage.local.os.write", writing)
    store, wanted = Store(str(tmp_path)), content(offset)
    store.write(f"{store.path}/one", wanted)
    assert bytes(store.read_all(f"{store.path}/one")) == wanted
    assert bool(direct) == (offset == 0), "only what is aligned goes this way"
