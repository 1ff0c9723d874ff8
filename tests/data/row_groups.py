"""Row groups in memory, for tests of reading: they count what is alive, and fail or wait where they
are told."""

import resource
import threading
import weakref

import numpy as np
import pyarrow as pa

from elastic_dp.data.pipeline.array_memory import aligned
from elastic_dp.errors import BadShard

WIDTH = 16  # of "tokens"
SHARD_GROUPS = 4


def resident_bytes():
    """Return the resident memory of this process, now."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


class FakeRowGroups:
    """`sizes`: rows of each. Columns: "id", counted through all, and "tokens" [rows, WIDTH] made of
    it.

    `mapped`: its memory is not to be written to. `bad`: cannot be decoded. `before`: called with
    the number in the thread that reads. `live_bytes` and `peak_bytes` are of what was read and is
    still referenced somewhere, and of what is being read.
    """

    def __init__(
        self,
        sizes,
        *,
        bad=(),
        before=lambda number: None,
        row_bytes=8 + 4 * WIDTH,
        mapped=True,
        threads=4,
    ):
        self.index, self.counts = None, dict[str, float]()
        self.threads = lambda: threads
        self.mapped = mapped
        self.rows = np.asarray(sizes, dtype=np.int64)
        self.nbytes = self.rows * row_bytes
        self.bad, self.before = set(bad), before
        self.first = np.concatenate([[0], np.cumsum(self.rows)])
        self.reads = []
        self.memory = []  # of each read
        self.live_bytes = self.peak_bytes = 0
        self.reading = 0  # by how many threads
        self._lock = threading.RLock()  # arrays may be freed by whoever holds it

    def read(self, row_group):
        self._count(int(self.nbytes[row_group]), 1)
        try:
            self.reads.append(row_group)
            self.before(row_group)
            if row_group in self.bad:
                raise BadShard(*self.name(row_group)[:2], "flipped bits")
            ids = aligned(np.arange(self.first[row_group], self.first[row_group + 1]))
            memory = pa.allocate_buffer(4 * WIDTH * len(ids))  # as decoded columns have it
            owner = np.frombuffer(memory, dtype=np.int32)  # of this memory, for all views of it
            tokens = owner.reshape(-1, WIDTH)
            np.multiply(ids[:, None], 100, out=tokens, casting="unsafe")
            tokens += np.arange(WIDTH, dtype=np.int32)
        except Exception:
            self._count(-int(self.nbytes[row_group]))
            raise
        finally:
            self._count(0, -1)
        weakref.finalize(owner, self._count, -int(self.nbytes[row_group]))
        self.memory.append(range(memory.address, memory.address + memory.size))
        tokens.flags.writeable = not self.mapped
        return {"id": ids, "tokens": tokens}, int(self.nbytes[row_group])

    def name(self, row_group):
        shard, number = divmod(row_group, SHARD_GROUPS)
        return (
            f"part-{shard}",
            number,
            int(self.first[row_group] - self.first[shard * SHARD_GROUPS]),
        )

    def close(self):
        assert not self.reading, "closed while a thread reads"

    @property
    def reading_bytes(self):
        return self.nbytes

    def _count(self, nbytes, reading=0):
        with self._lock:
            self.reading += reading
            self.live_bytes += nbytes
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
