"""What workers that die leave behind: no file, and no descriptor in the process that leads."""

import os
import tempfile

from elastic_dp.cluster.heartbeats import Page
from elastic_dp.protocol.messages import StopRequested
from tests.patience import eventually
from tests.runs import ENDLESS, group, spec_of
from tests.train.jobs import plain


def test_one_that_is_killed_before_its_pulse_has_started_leaves_no_file(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    Page().write(1, 2, "body")
    assert not list(tmp_path.iterdir())


def test_dead_workers_hold_no_descriptors():
    seen = []

    def settled(run):
        status = run.controller.status()
        whole = status["phase"] == "running" and status["world_size"] == 2
        return whole and (not seen or descriptors() <= seen[0])

    def look(run):
        """Not more than with the first two, once two train again."""
        eventually(lambda: settled(run), lambda: (seen, descriptors(), run.controller.status()))
        seen.append(descriptors())
        run.fleet.kill(max(run.fleet.processes))

    spec = spec_of(steps=ENDLESS, workers=2, config={"hold": {0: 2}})
    looks = [(2, look), (6, look), (10, look)]
    outcome, _ = group(spec, plain, script=[*looks, (11, StopRequested("enough"))])
    assert outcome.error is None, outcome.traceback
    assert len(seen) == 3


def descriptors():
    return len(os.listdir("/proc/self/fd"))
