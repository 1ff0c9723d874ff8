"""A worker that trains for long keeps nothing of the generations that have ended."""

import os
import signal
from pathlib import Path

import pytest

from tests.runs import group, spec_of
from tests.train.jobs import adamw, classifier, cross_entropy

SETTLED, END = 60, 300  # generations; every second one begins with a kill
MAX_BYTES = 0.05 * 2**20  # for each kill


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
def test_survivor_of_a_hundred_kills_has_the_memory_that_it_had(tmp_path):
    said = tmp_path / "resident"

    def train(ctx):
        model, generations, resident = classifier(), set(), {}
        for _ in ctx.steps(model, adamw(model), cross_entropy):
            generations.add(ctx._session.generation)
            resident.setdefault(len(generations), resident_bytes())
            if len(generations) == END:
                said.write_text(str((resident[END] - resident[SETTLED]) * 2 / (END - SETTLED)))
                ctx.stop("enough")
            if ctx.world_size == 2 and ctx.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)

    spec = spec_of(steps=1 << 20, workers=2, virtual=2, max_time_s=600)
    outcome, _ = group(spec, train, timeout_s=700)
    assert outcome.workers_lost >= (END - SETTLED) // 2
    assert float(said.read_text()) < MAX_BYTES
