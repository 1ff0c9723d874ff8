"""One digest for every fleet: fixed sizes, a zoo of models through changing sizes, and random histories."""

import random
import time

import pytest

from elastic_dp.protocol.messages import DrainNoticed, SizeRequested
from elastic_dp.spec import MapStyleData
from tests.runs import Points, group, local, resize, spec_of
from tests.train.jobs import ZOO, average_and_plateau, batch_norm, compiled, plain


def evaluation():
    return MapStyleData(Points(30), micro_batch_size=8)


@pytest.mark.parametrize("train", [plain, batch_norm], ids=lambda f: f.__name__)
def test_fixed_sizes(train):
    digests = {0: local(spec_of(steps=20), train).digest}
    for workers in (1, 2, 3, 4, 5, 8):
        outcome, _ = group(spec_of(steps=20, workers=workers, min_workers=workers), train)
        assert outcome.error is None, outcome.traceback
        digests[workers] = outcome.digest
    assert len(set(digests.values())) == 1, digests


@pytest.mark.parametrize("name", ZOO)
def test_zoo(name):
    """1 → 2 → 3 → 5 → 8 → 3 workers while it trains; the bodies wait until each size is there."""
    sizes = {2: 2, 12: 3, 24: 5, 36: 8, 48: 3}
    shape = (3, 8, 8) if name == "channels_last" else ()
    config = {"eval": evaluation(), "hold": sizes}
    spec = spec_of(steps=56, workers=1, shape=shape, config=config)
    calm = local(spec, ZOO[name])
    script = [resize(step, size) for step, size in sizes.items()]
    outcome, run = group(spec, ZOO[name], script=script)
    assert outcome.error is None, outcome.traceback
    assert outcome.generations >= 4  # one change may overtake another
    assert outcome.digest == calm.digest
    logged = [
        line for _, line in run.journal._kept if "event" not in line and "command" not in line
    ]
    assert [{k: v for k, v in x.items() if k != "time"} for x in logged] == calm.logged


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it compiles
def test_a_compiled_model():
    spec = spec_of(steps=6)
    assert group(spec, compiled)[0].digest == local(spec, compiled).digest


@pytest.mark.parametrize(("rows", "train"), [(70, batch_norm), (50, batch_norm), (33, plain)])
def test_a_short_tail(rows, train):
    """The last batch of each epoch has fewer rows; some virtual workers get none."""
    spec = spec_of(steps=12, rows=rows, tail="short", min_workers=3)
    calm = local(spec, train)
    assert group(spec, train)[0].digest == calm.digest
    assert calm.digest != local(spec_of(steps=12, rows=rows), train).digest


def test_an_uneven_number_of_virtual_workers():
    spec = spec_of(steps=8, virtual=7, workers=3, min_workers=3)
    assert group(spec, plain)[0].digest == local(spec, plain).digest


def test_another_step_is_another_result():
    """The equalities above could not fail if all runs gave the same weights anyway."""
    assert local(spec_of(steps=20), plain).digest != local(spec_of(steps=19), plain).digest


@pytest.mark.parametrize("seed", range(20))
def test_random_histories(seed):
    """Kills, joins, drains and scalings at random steps."""
    rng = random.Random(seed)
    train = (plain, average_and_plateau, batch_norm)[seed % 3]
    config = {"eval": evaluation(), "body_s": 0.01}
    spec = spec_of(steps=80, workers=3, standby=rng.randrange(2), config=config)
    calm = local(spec_of(steps=80, config={"eval": evaluation()}), train)
    done = []

    def disturb(run):
        workers = run.controller.status()["workers"]
        members = sorted(w for w, stage in workers.items() if stage == "member")
        what = rng.choice(["kill", "kill", "drain", "scale"])
        if what == "scale":
            run.controller.post(SizeRequested(rng.randint(1, 6)))
        elif len(members) < 2 or run.controller.status()["phase"] != "running":
            return  # whoever alone holds the state stays: checkpoints are for losing that
        elif what == "drain":
            deadline = rng.choice([None, time.monotonic() + 1.0])
            run.controller.post(DrainNoticed(rng.choice(members), deadline))
        else:
            run.fleet.kill(rng.choice(members))
        done.append(what)

    script = [(step, disturb) for step in sorted(rng.sample(range(2, 75), 7))]
    outcome, _run = group(spec, train, script=script)
    lost = "every worker that held the state is lost"
    if outcome.error is not None and lost in outcome.error:
        pytest.skip("this history killed all who held the state")  # checkpoints are for that
    assert outcome.error is None, outcome.traceback
    assert done
    assert outcome.digest == calm.digest, (seed, done)
