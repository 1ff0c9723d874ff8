"""Nodes that come within seconds of each other stop the group once or twice, and a planned stop is
short.

What is asserted is how often the group stops; how long is for a quiet machine, where `pytest -s`
shows it.
"""

import itertools
import statistics
import time

from torch import nn

from elastic_dp.coordinator.messages import DrainNoticed, SizeRequested, StopRequested
from elastic_dp.testing.process_worker_group import ProcessRun
from tests.patience import PATIENCE_S, eventually
from tests.runs import formed_of, local, spec_of
from tests.train.jobs import adamw, cross_entropy

NODES, BURST_S = 5, 1.5


def train(ctx):
    """A state of 3 MB."""
    model = nn.Sequential(nn.Linear(16, 480), nn.ReLU(), nn.Linear(480, 480), nn.Linear(480, 4))
    for _ in ctx.steps(model, adamw(model), cross_entropy):
        ctx.log({"generation": ctx.generation})
        time.sleep(ctx.config["body_s"])


def pauses_ms(steps):
    """Return the pause of each change of the group: from the last step before to the first one
    after, beyond a median step of that."""
    gaps = [
        (a["generation"], b["generation"], 1e3 * (b["time"] - a["time"]))
        for a, b in itertools.pairwise(steps)
    ]
    return [
        round(gap - statistics.median(g for c, d, g in gaps if c == d == b))
        for a, b, gap in gaps
        if a != b
    ]


def test_a_burst_of_nodes_stops_the_group_once_or_twice():
    job = dict(
        workers=NODES + 1, virtual=6, stabilization_s=PATIENCE_S
    )  # however slowly they start
    made = spec_of(steps=100_000, config={"body_s": 0.05}, **job)

    with ProcessRun(made, train, limit=1) as run:
        status = run.controller.status

        def trains(size):
            at = status()["step"]
            eventually(lambda: is_at(size, at + 1), status)
            at = status()["step"]
            eventually(lambda: is_at(size, at + 4), status)
            return status()

        def is_at(size, step):
            now = status()
            return (now["world_size"], now["phase"]) == (size, "running") and now["step"] >= step

        before = trains(1)
        began = time.monotonic()
        for node in range(NODES):
            time.sleep(max(0.0, began + node * BURST_S / (NODES - 1) - time.monotonic()))
            run.worker_group.allow(2 + node)
        after = trains(NODES + 1)
        run.controller.post(SizeRequested(3))
        members = trains(3)["workers"]
        last = max(worker for worker, stage in members.items() if stage == "member")
        run.controller.post(DrainNoticed(last, None))
        eventually(lambda: last not in status()["workers"], status)
        trains(3)
        run.controller.post(StopRequested("enough"))
        outcome = run.wait(PATIENCE_S)
        print("pauses, ms:", pauses_ms(run.journal.recorded()))
    assert outcome.error is None, outcome.traceback
    formed = [n for n in formed_of(run) if before["generation"] < n <= after["generation"]]
    assert 1 <= len(formed) <= 2
    calm = local(spec_of(steps=outcome.step, config={"body_s": 0.0}, **job), train)
    assert outcome.digest == calm.digest
