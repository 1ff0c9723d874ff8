"""What workers that die leave behind: no file, and no descriptor in the process that leads."""

import contextlib
import os

from elastic_dp.cluster.heartbeat.shared_memory_page import SharedMemoryPage
from elastic_dp.coordinator.messages import StopRequested
from tests.patience import eventually
from tests.runs import ENDLESS, group, spec_of
from tests.train.jobs import plain


def test_page_of_a_worker_killed_before_its_heartbeats_start_leaves_no_file():
    page = SharedMemoryPage()
    for descriptor in (page._file, page._stacks):
        assert os.fstat(descriptor).st_nlink == 0, "it has a name, which outlives a killed worker"


DEATHS = 6
# Descriptors that come and go, fewer than one for each death: of a group that ends, of what the two
# workers have prepared for the next one, and of what other tests left.
OTHERS = 4


def test_dead_workers_hold_no_descriptors():
    seen, dead = [], set()

    def settled(run):
        status = run.controller.status()
        whole = status["phase"] == "running" and status["world_size"] == 2
        return (
            whole
            and not dead & status["workers"].keys()
            and (len(seen) < DEATHS or len(descriptors()) <= len(seen[0]) + OTHERS)
        )

    def look(run):
        """At the end hardly more than with the first two, once two train again."""
        eventually(lambda: settled(run), lambda: (run.controller.status(), descriptors()))
        seen.append(descriptors())
        if len(seen) <= DEATHS:
            newest = max(run.worker_group.processes)
            dead.add(newest)
            run.worker_group.kill(newest)

    spec = spec_of(steps=ENDLESS, workers=2, config={"hold": {0: 2}, "body_s": 0.05})
    looks = [(2 + 3 * i, look) for i in range(1 + DEATHS)]
    outcome, _ = group(spec, plain, script=[*looks, (4 * DEATHS, StopRequested("enough"))])
    assert len(seen) == 1 + DEATHS and outcome.workers_lost == DEATHS


def descriptors():
    """What each is."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
    return found
