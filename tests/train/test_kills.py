"""A kill costs one step: every named instant, every rank, one victim and two, compared with the undisturbed run.

The job keeps an average of the weights in the loop's body, which enters the loss: a body that ran twice, or not at
all, in any process, changes the final weights. The evaluation inside it is logged and compared, too.
"""

import pytest

from elastic_dp.protocol.messages import Place
from elastic_dp.spec import MapStyleData
from elastic_dp.train.faults import POINTS, Fault
from tests.runs import Points, group, local, spec_of
from tests.train.jobs import average_and_plateau, batch_norm

WHILE_FORMING = ("forming", "giving_state", "taking_state")
VICTIMS = [(0,), (1,), (2,), (0, 1), (1, 2), (0, 2)]


STEPS = 240  # of which a planned end may take some thirty, and there are half a dozen


def job(steps=STEPS, workers=3, **options):
    config = {
        "eval": MapStyleData(Points(60), micro_batch_size=8),
        "body_s": 0.008,
        "hold": {0: workers},
        **options,
    }
    return spec_of(steps=steps, workers=workers, min_workers=1, standby=1, config=config)


def one_after_another(point, tmp_path):
    """For each of VICTIMS in turn, with the group at full size: these ranks die at `point`."""
    faults, before = [], ()
    for i, ranks in enumerate(VICTIMS):
        files = [str(tmp_path / f"{i}-{rank}") for rank in ranks]
        faults += [
            Fault(point, rank=rank, world_size=3, once=file, after=before, settled=True)
            for rank, file in zip(ranks, files, strict=True)
        ]
        before += tuple(files)
    return tuple(faults)


@pytest.fixture(scope="module")
def calm():
    """Digest and last logged evaluation of the undisturbed run, by train function."""
    return {f: local(job(), f) for f in (average_and_plateau, batch_norm)}


def check(outcome, run, undisturbed, kills):
    assert outcome.error is None, outcome.traceback
    assert outcome.step == STEPS
    assert outcome.digest == undisturbed.digest
    assert outcome.workers_lost == kills  # the survivors kept their processes
    lines = [line for _, line in run.journal._kept]
    stops = [line["place"] for line in lines if line.get("event") == "WorkerStopped"]
    assert all(isinstance(place, Place) for place in stops)
    if undisturbed.logged:
        metrics = {x["step"]: x["eval_loss"] for x in lines if "eval_loss" in x}
        assert metrics == {x["step"]: x["eval_loss"] for x in undisturbed.logged}


@pytest.mark.parametrize("point", [p for p in POINTS if p not in WHILE_FORMING])
def test_killed_at(point, calm, tmp_path):
    """Each of VICTIMS in turn, the group back at full size in between."""
    train = batch_norm if point == "buffers" else average_and_plateau
    faults = one_after_another(point, tmp_path)
    outcome, run = group(job(), train, faults=faults)
    assert outcome.error is None, outcome.traceback
    assert len(list(tmp_path.iterdir())) == len(faults)  # all of them happened
    check(outcome, run, calm[train], kills=len(faults))
    assert outcome.generations > len(VICTIMS)


@pytest.mark.parametrize("point", WHILE_FORMING)
@pytest.mark.parametrize("ranks", VICTIMS, ids=str)
def test_killed_while_a_generation_forms(point, ranks, calm, tmp_path):
    """A first kill makes a generation of three whole workers and a joiner form; then these die in that."""
    first = str(tmp_path / "first")
    faults = (
        Fault("after_step", rank=3, world_size=4, once=first, settled=True),
        *(Fault(point, rank=r, once=str(tmp_path / f"second-{r}"), after=(first,)) for r in ranks),
    )
    outcome, run = group(job(workers=4), average_and_plateau, faults=faults)
    kills = len(list(tmp_path.iterdir()))
    check(outcome, run, calm[average_and_plateau], kills)


@pytest.mark.parametrize("late", [0, 1])
def test_one_ran_the_next_body_and_one_is_still_behind(late, calm, tmp_path):
    """Rank `late` is held before its commit of step 61; rank 2 commits, runs the body, and dies in step 62."""
    faults = (
        Fault("before_commit", 61, late, action="sleep", seconds=1.0, once=str(tmp_path / "held")),
        Fault("before_forward", 62, rank=2, once=str(tmp_path / "dead")),
    )
    outcome, run = group(job(), average_and_plateau, faults=faults)
    check(outcome, run, calm[average_and_plateau], kills=1)
    stops = [
        line["place"].step
        for _, line in run.journal._kept
        if line.get("event") == "WorkerStopped" and "planned" not in line["reason"]
    ]
    assert {s for s in stops if s < STEPS} == {60, 61}  # they really differed by one step
