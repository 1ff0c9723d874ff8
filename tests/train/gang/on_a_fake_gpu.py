"""An undisturbed run of two gangs whose processes share a fake GPU, as a command: it prints the
error, the digest, and why the run is not exact.

    PYTHONPATH=tests/device/fake_gpu_site:. python -m tests.train.gang.on_a_fake_gpu
"""

from __future__ import annotations

import json

from elastic_dp.testing.process_worker_group import ProcessRun
from tests.train.gang.jobs import gangs, trains


def main() -> None:
    spec = gangs(2, resources_per_worker={"CPU": 1, "GPU": 2})
    with ProcessRun(spec, trains, shares_gpu=True) as run:
        outcome = run.wait(240.0)
    print(json.dumps([outcome.error, outcome.digest, outcome.inexact_because]))


if __name__ == "__main__":
    main()
