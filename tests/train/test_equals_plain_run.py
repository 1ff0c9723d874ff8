"""A run of any strategy and optimizer, disturbed in any way, has the bits and the metrics of the
same run in one process that nothing disturbs."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

from elastic_dp.config import CheckpointConfig, JobSpec
from elastic_dp.coordinator.messages import WorkerLocation
from elastic_dp.train.fault_injection import WorkerFault
from tests.kit.simulated_device import SimulatedDevice
from tests.runs import formed_of, group, lines_of, local, never_put_off, resize, spec_of
from tests.train import (
    test_kills,
    test_large_batch_optimizers,
    test_precision,
    test_sharded_optimizer,
)
from tests.train.checkpointing.test_worker_checkpointer import kill_all, when_committed
from tests.train.jobs import ZOO, batch_norm, in_small_buckets, plain
from tests.train.test_finished_work import (
    LARGE_LOSS,
    SMALL_LOSS,
    STEP,
    VIRTUAL,
    counted,
    dies_last,
    passes,
)
from tests.train.test_finished_work import job as job_of_three
from tests.train.test_inner_moments import trains as moments
from tests.train.test_inner_moments import trains_delayed as delayed_moments
from tests.train.test_inner_steps import (
    HOW,
    INNER,
    measuring,
    outer,
    trains_batch_norm,
    trains_with_moments,
)
from tests.train.test_kills import IN_A_STEP, IN_BUCKETS, SECONDS, VICTIMS
from tests.train.test_master_weights import with_masters
from tests.train.test_noise_scale import logs
from tests.train.test_weight_prediction import predicting

SLOW = pytest.mark.slow
H = {"inner_steps": INNER}
# The train function, options of the job (and "virtual", the virtual workers), and what ctx.config
# has. Schedules change at step 6, where workers are killed, or at the one after it.
STRATEGIES = {
    "replicated": (batch_norm, {}, {}),
    "bf16": (logs, {"wire": "bf16"}, {}),
    "int8": (logs, {"wire": "int8"}, {}),
    "delayed": (batch_norm, {"staleness": 1}, {}),
    "delayed int8": (batch_norm, {"staleness": 1, "wire": "int8"}, {}),
    "predicted": (predicting, {"staleness": 1}, {}),
    "predicted int8": (predicting, {"staleness": 1, "wire": "int8"}, {}),
    "inner": (measuring, H, {}),
    "inner with Adam's moments": (trains_with_moments, H, {}),
    "inner, delayed int8": (trains_batch_norm, H | {"staleness": 1, "wire": "int8"}, {}),
    "factored moments int8": (moments, H | {"wire": "int8"}, {"second_moments": "factored"}),
    "whole moments bf16": (moments, H | {"wire": "bf16"}, {"second_moments": "whole"}),
    "delayed moments int8": (
        delayed_moments,
        H | {"staleness": 1, "wire": "int8"},
        {"second_moments": "factored"},
    ),
    "masters": (with_masters, {}, {}),
    "noise scale": (logs, {}, {}),
    "grows to step 6": (batch_norm, {"virtual": {0: 4, 3: 6, 5: 12}}, {}),
    "grows after step 6": (batch_norm, {"virtual": {0: 4, 6: 12}}, {}),
    "delays from step 6": (batch_norm, {"staleness": {0: 0, 5: 1}}, {}),
    "delays from step 5 to 6": (batch_norm, {"staleness": {0: 0, 4: 1, 6: 0}}, {}),
    "delays to step 5": (batch_norm, {"staleness": {0: 1, 5: 0}}, {}),
    "inner from step 6": (trains_batch_norm, {"inner_steps": {0: 1, 5: 3}}, {}),
    "inner moments to step 6": (trains_with_moments, {"inner_steps": {0: 3, 6: 2}}, {}),
    "all change": (
        trains_batch_norm,
        {
            "virtual": {0: 4, 6: 8},
            "inner_steps": {0: 1, 4: 3, 8: 2},
            "staleness": {0: 0, 5: 1, 8: 0},
            "wire": "int8",
        },
        {},
    ),
    **{
        f"sharded {name}": (train, {"sharding": "optimizer"} | options, {})
        for name, train, options in (
            ("AdamW", plain, {}),
            ("buffers, int8", batch_norm, {"wire": "int8"}),
            ("masters", with_masters, {}),
            ("masters, bf16", with_masters, {"wire": "bf16"}),
            ("growing", plain, {"virtual": {0: 4, 5: 12}}),
            ("with a state that was loaded", test_sharded_optimizer.begins_with_state, {}),
            *(
                (name, test_large_batch_optimizers.training(make), {})
                for name, make in test_large_batch_optimizers.OPTIMIZERS.items()
                if name != "Muon"
            ),
        )
    },
    **{
        name: (test_large_batch_optimizers.training(make), {}, {})
        for name, make in test_large_batch_optimizers.OPTIMIZERS.items()
    },
    **{
        f"torchao, {name}": (test_precision.training(name), {}, {})
        for name in test_precision.OPTIMIZERS
    },
    "products in fp8": (test_precision.train_in_fp8, {}, {}),
}


@dataclass
class Disturbed:
    """A job, what happens to it, and how many workers are lost at least."""

    spec: JobSpec
    faults: tuple[WorkerFault, ...] = ()
    lost: int = 0
    cut: Callable[..., Any] = lambda train: train
    how: dict[str, Any] = field(default_factory=dict)  # arguments of `group`
    topology: Any = None  # of some generation
    generations: int | None = None  # exactly


def on_nodes(count, zones=1):
    """Workers in turn on nodes n0, n1, …, which are in turn in zones z0, z1, …"""

    def location(worker):
        number = int(worker.removeprefix("w")) % count
        return WorkerLocation(f"n{number}", zone=f"z{number % zones}")

    return location


def topologies(run):
    """Return the topology of each generation, with the sizes in falling order: the node of the
    worker that came first has the first ranks."""
    formed = [line for line in lines_of(run) if line.get("command") == "FormGeneration"]
    return [[sorted(sizes, reverse=True) for sizes in line.get("topology", ())] for line in formed]


def of_size(workers, folder):
    """11 virtual workers, of which some have fewer rows in the last step of an epoch."""
    options = {"workers": workers, "min_workers": workers, "virtual": 11}
    spec = spec_of(steps=7, rows=200, tail="short", **options)
    cut = in_small_buckets if workers == 3 else lambda train: train
    return Disturbed(spec, cut=cut, generations=1)


def resized(folder):
    """The third step is the last of an epoch: some virtual workers have no row."""
    sizes = {2: 3, 6: 2}
    config = {"hold": sizes, "body_s": 0.02}
    spec = spec_of(steps=9, workers=1, virtual=6, rows=180, tail="short", config=config)
    return Disturbed(spec, how={"script": [resize(*one) for one in sizes.items()]})


def killed(point, ranks, folder):
    """In the second micro-batch, where one has the point."""
    nth = 2 if point in ("before_forward", "forward", "backward") else 1
    faults = tuple(
        WorkerFault(point, step=STEP, rank=rank, nth=nth, once=str(folder / f"dead-{rank}"))
        for rank in ranks
    )
    # Not all of these jobs have buffers or gather parameters, none evaluates, and the first delayed
    # step applies no gradient. Of two, the second one may hear of the loss of the first before it
    # comes to the point.
    sometimes = ("buffers", "optimizer", "prepared", "gathered", "evaluate", "evaluate_exchange")
    lost = 0 if point in sometimes else 1
    spec = job_of_three(min_workers=1)
    return Disturbed(spec, faults, lost, in_small_buckets if point in IN_BUCKETS else lambda t: t)


def killed_one_after_the_other(folder):
    """The second one in the step in which lost micro-batches of the first one run again."""
    first, second = str(folder / "first"), str(folder / "second")
    faults = (
        WorkerFault("exchange", step=STEP, rank=0, once=first),
        WorkerFault("backward", rank=0, world_size=2, once=second, after=(first,)),
    )
    return Disturbed(job_of_three(min_workers=1), faults, lost=2)


def killed_on_a_device(point, folder):
    made = killed(point, (2,), folder)
    return dataclasses.replace(made, how={"device": SimulatedDevice()})


def killed_while_it_grows(folder):
    """On two nodes, in the first step of more virtual workers."""
    config = {"hold": dict.fromkeys(range(1, 5), 3)}
    spec = spec_of(steps=9, virtual={0: 4, 3: 6, 6: 12}, rows=300, config=config)
    dead = WorkerFault("backward", step=7, rank=2, once=str(folder / "dead"))
    return Disturbed(spec, (dead,), lost=1, how={"location": on_nodes(2)})


def killed_on_nodes(workers, nodes, zones, topology, device, folder):
    """The group forms again without the lost worker, and later with its replacement, which runs on
    any of the nodes. The sums finish within a node first."""
    hold = dict.fromkeys(range(1, 6), workers)  # a body waits no longer than for one change
    hold |= {} if workers == 3 else {9: workers}  # a replacement takes time
    spec = spec_of(steps=12, workers=workers, virtual=8, config={"hold": hold})
    fault = WorkerFault("exchange", step=STEP, rank=1, once=str(folder / "dead"))
    how = {"location": on_nodes(nodes, zones), "device": device}
    return Disturbed(spec, (fault,), lost=1, how=how, topology=topology)


def zone_lost(folder):
    """The two workers of one of two zones. The sums of a zone leave it as one before that."""
    spec = spec_of(steps=8, workers=4, virtual=4, config={"hold": {1: 4, 2: 4, 7: 4}})
    zone = tuple(
        WorkerFault("backward", step=6, rank=rank, once=str(folder / str(rank))) for rank in (2, 3)
    )
    how = {"location": on_nodes(4, zones=2)}
    return Disturbed(spec, zone, lost=2, how=how, topology=[[2, 2]])


def all_lost(folder):
    """The run goes on from a checkpoint."""
    url, gate = folder / "run", folder / "gate"
    config = {"gates": {6: str(gate)}, "body_s": 0.02}
    spec = spec_of(steps=10, workers=2, config=config, checkpoint=CheckpointConfig(every_steps=4))
    script = [(1, when_committed(url, 4, kill_all)), (1, lambda run: gate.touch())]
    return Disturbed(spec, lost=2, cut=never_put_off, how={"script": script, "url": str(url)})


FAULTS = {
    **{f"{n} workers": partial(of_size, n) for n in range(1, 9)},
    "1, 3, 2 workers": resized,
    **{
        f"{point} of {ranks}": partial(killed, point, ranks)
        for point, ranks in zip(IN_A_STEP, itertools.cycle(VICTIMS))
    },
    "one after the other": killed_one_after_the_other,
    **{
        f"{point} on a device": partial(killed_on_a_device, point)
        for point in ("backward", "exchange", "before_commit")
    },
    **{f"{point} of (1,)": partial(killed, point, (1,)) for point in ("prepared", "gathered")},
    "while it grows": killed_while_it_grows,
    "3 on 2 nodes": partial(killed_on_nodes, 3, 2, 1, [[2, 1]], None),
    "6 on 4 nodes": partial(killed_on_nodes, 6, 4, 2, [[2, 2, 1, 1], [3, 3]], None),
    "7 on 3 nodes": partial(killed_on_nodes, 7, 3, 1, [[3, 2, 2]], None),
    "8 on 4 nodes": partial(killed_on_nodes, 8, 4, 2, [[2, 2, 2, 2], [4, 4]], None),
    "4 on 2 nodes, on a device": partial(killed_on_nodes, 4, 2, 1, [[2, 2]], SimulatedDevice()),
    "a zone": zone_lost,
    "all": all_lost,
}
# What one of them shows that the others before it do not. The others are tried with `make slow`.
IN_CI = {
    *itertools.product(("bf16", "int8", "delayed", "inner"), ["3 workers"]),
    *itertools.product(("replicated", "sharded AdamW"), ["5 workers"]),
    *itertools.product(("sharded masters", "sharded buffers, int8"), ["prepared of (1,)"]),
    ("sharded AdamW", "gathered of (1,)"),
    ("replicated", "3 on 2 nodes"),
    ("noise scale", "backward of (2,)"),
    ("delays from step 6", "exchange on a device"),
    ("all change", "backward of (2,)"),
    *itertools.product(
        ("delayed", "inner, delayed int8", "factored moments int8", "whole moments bf16"),
        ["1, 3, 2 workers"],
    ),
    *itertools.product(("predicted", "masters"), ["1, 3, 2 workers"]),
    ("predicted", "backward of (2,)"),
    ("inner", "backward on a device"),
}


SHARDED_BY_ADAM = [x for x in STRATEGIES if x.startswith("sharded") and "buffers" not in x]
# Faults that may take both holders of a part of a sharded optimizer's state.
LOSE_BOTH = ("one after the other", "a zone", *(f"of {ranks}" for ranks in VICTIMS[3:]))


def pairs():
    made = [
        (strategy, fault)
        for strategy, fault in itertools.product(STRATEGIES, FAULTS)
        if not (strategy.startswith("sharded") and fault.endswith(LOSE_BOTH))
        # There, what Adam counts on the host is the device's. See sharding/test_sharded_on_devices.
        if not (strategy in SHARDED_BY_ADAM and "on a device" in fault)
    ]
    return [pytest.param(*pair, marks=() if pair in IN_CI else SLOW) for pair in made]


def job_of(strategy, spec):
    train, options, config = STRATEGIES[strategy]
    return with_options(spec, **options, config={**spec.config, **config}), train


def with_options(spec, virtual=None, **options):
    if virtual is not None:
        options["scaling"] = dataclasses.replace(spec.scaling, virtual_workers=virtual)
    return dataclasses.replace(spec, **options)


def alone_of(spec, monkeypatch):
    """What cuts the state of a run into units, where it is sharded, and what runs it alone."""
    if not spec.sharding:
        return lambda train: train, local
    if spec.wire == "int8":
        monkeypatch.setattr(test_sharded_optimizer, "SMALL_UNIT_BYTES", 1024)  # a block
    return test_sharded_optimizer.in_small_units, test_sharded_optimizer.not_sharded


def logged(lines):
    """Return what the loop logged. NaN equals NaN."""
    kept = [line for line in lines if "event" not in line and "command" not in line]
    return [repr({k: v for k, v in line.items() if k != "time"}) for line in kept]


def test_pairs_in_ci_exist():
    assert {param.values for param in pairs()} >= IN_CI


@pytest.mark.parametrize(("strategy", "fault"), pairs())
def test_disturbed_run_equals_the_plain_one(strategy, fault, tmp_path, monkeypatch):
    made = FAULTS[fault](tmp_path)
    spec, train = job_of(strategy, made.spec)
    in_units, alone = alone_of(spec, monkeypatch)
    outcome, run = group(spec, made.cut(in_units(train)), faults=made.faults, **made.how)
    assert outcome.workers_lost >= made.lost
    calm = alone(spec, train)
    assert (outcome.step, outcome.digest) == (calm.step, calm.digest)
    assert logged(lines_of(run)) == logged(calm.logged)
    assert made.topology is None or made.topology in topologies(run)
    assert made.generations is None or made.generations == len(formed_of(run))


@SLOW
@pytest.mark.parametrize("seconds", SECONDS, ids=str)
@pytest.mark.parametrize("strategy", ["delayed", "inner"])
def test_run_killed_while_a_generation_forms_equals_the_plain_one(strategy, seconds, tmp_path):
    spec, train = job_of(strategy, test_kills.job(workers=4))
    faults = test_kills.while_it_forms(seconds, tmp_path)
    outcome, _ = test_kills.with_faults(spec, train, faults)
    calm = dataclasses.replace(spec, max_steps=outcome.step)
    assert outcome.digest == local(calm, train).digest


# One of each kind: buffers, scaled and clipped gradients, state of optimizers, bodies, parameters.
ZOO_IN_CI = {
    *(("replicated", name, False) for name in ("batch_norm", "autocast_fp16", "bf16_parameters")),
    *(("replicated", name, False) for name in ("clipped_average_norm", "average_and_plateau")),
    *(("replicated", name, False) for name in ("lazy_optimizer_state", "checkpointed_reentrant")),
    ("replicated", "branching", True),
    ("sharded AdamW", "frozen_and_unused", False),
}
NOT_FOR = {
    # Refused: the loss reads the body; and one wants a norm in the first step.
    "delayed": ("average_and_plateau", "lazy_optimizer_state", "clipped_average_norm"),
    # Refused: loss scaling, and an optimizer that torch does not have.
    "sharded AdamW": ("autocast_fp16", "optimizer_with_a_state_of_its_own"),
}
# Once more with their gradients in many buckets: some are absent, on some ranks or on all, or come
# twice.
ZOO_IN_BUCKETS = ("frozen_and_unused", "branching", "checkpointed_reentrant")


def zoo():
    made = [
        *itertools.product(
            ("replicated", "bf16", "int8", "delayed", "sharded AdamW"), ZOO, [False]
        ),
        *itertools.product(["replicated"], ZOO_IN_BUCKETS, [True]),
    ]
    return [
        pytest.param(*one, marks=() if one in ZOO_IN_CI else SLOW)
        for one in made
        if one[1] not in NOT_FOR.get(one[0], ())
    ]


@pytest.mark.parametrize(("strategy", "name", "buckets"), zoo())
# Its body steps the scheduler in the first step, too, in which the optimizer is not called.
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_zoo_model_through_changing_sizes_equals_the_plain_run(
    strategy, name, buckets, monkeypatch
):
    """1 → 3 → 2 workers while it trains; the bodies wait until each size is there."""
    sizes = {2: 3, 9: 2}
    shape = (3, 8, 8) if name == "channels_last" else ()
    config = {"eval": test_kills.job().config["eval"], "hold": sizes, "body_s": 0.02}
    spec = spec_of(steps=16, workers=1, virtual=6, shape=shape, config=config)
    spec = with_options(spec, **STRATEGIES[strategy][1])
    in_units, alone = alone_of(spec, monkeypatch)
    train = in_units(in_small_buckets(ZOO[name]) if buckets else ZOO[name])
    outcome, run = group(spec, train, script=[resize(*one) for one in sizes.items()])
    assert outcome.generations >= 2  # one change may overtake another
    calm = alone(spec, ZOO[name])
    assert outcome.digest == calm.digest
    assert logged(lines_of(run)) == logged(calm.logged)


def without(strategy, option, otherwise):
    """Whether the option changes a bit."""
    spec, train = job_of(strategy, spec_of(steps=4, virtual=3))
    plain = dataclasses.replace(spec, **{option: otherwise})
    return local(spec, train).digest == local(plain, train).digest


@pytest.mark.parametrize("strategy", ["bf16", "int8", "delayed", "inner, delayed int8"])
def test_option_of_a_strategy_changes_the_bits(strategy):
    """The equalities above could not fail for its sake otherwise."""
    for option in STRATEGIES[strategy][1].keys() - {"inner_steps"}:
        assert not without(strategy, option, 0 if option == "staleness" else None)


def dies(rank, nth, point="backward", step=STEP):
    return {"rank": rank, "nth": nth, "point": point, "step": step}


DELAYS = {0: 0, 4: 1, 8: 0}
LOST = [  # options of the job, where one of three workers with 4 of 12 virtual workers each dies
    ({"min_workers": 3, "standby": 1}, {}, dies(2, 3, "before_forward"), 2),
    ({"min_workers": 3, "standby": 1}, {}, dies(2, 3), 3),
    ({}, {}, dies(0, 4), 4),
    ({}, {}, dies(2, 4), 4),
    ({}, {"wire": "bf16"}, dies(1, 4), 4),
    ({}, {"wire": "int8"}, dies(1, 4), 4),
    # Those of the step before run again, too.
    ({}, {"staleness": 1}, dies(1, 4), 8),
    # In the first step of more virtual workers; the membership distributes 6.
    ({}, {"virtual": {0: 6, 5: 12}}, dies(2, 4), 4),
    # In the first delayed step, in later ones, and in the first that is not delayed again.
    *(
        pytest.param({}, {"staleness": DELAYS}, dies(2, 4, step=step), again, marks=marks)
        for step, again, marks in ((9, 4, ()), (5, 4, SLOW), (6, 8, SLOW), (8, 8, SLOW))
    ),
    # In the last inner step of its last one.
    ({}, {"inner_steps": INNER}, dies(1, 4 * INNER), 4),
    ({}, {"inner_steps": INNER, "wire": "int8", "staleness": 1}, dies(1, 4 * INNER), 8),
    pytest.param({}, {"inner_steps": INNER, "wire": "bf16"}, dies(1, 4 * INNER), 4, marks=SLOW),
]


@pytest.mark.parametrize(("scaling", "options", "dead", "again"), LOST, ids=str)
def test_of_a_lost_worker_only_its_virtual_workers_run_again(
    scaling, options, dead, again, tmp_path
):
    spec = with_options(job_of_three(**{"min_workers": 2} | scaling), **options)
    inner = options.get("inner_steps", 1)
    train = counted(tmp_path, **({"optimizer": outer, **HOW} if inner > 1 else {}))
    fault = WorkerFault(**dead, once=str(tmp_path / "dead"))
    outcome, _ = group(spec, dies_last(train, tmp_path), faults=(fault,))
    assert outcome.workers_lost == 1
    times = passes(tmp_path, dead["step"])
    assert sum(times.values()) == inner * (VIRTUAL + again)
    assert "staleness" in options or len(times) == inner * VIRTUAL
    (tmp_path / "passes").unlink()
    assert outcome.digest == local(spec, train).digest
    assert sum(passes(tmp_path, dead["step"]).values()) == inner * VIRTUAL


@pytest.mark.parametrize("step", [LARGE_LOSS, SMALL_LOSS], ids=["overflows", "smaller scale"])
@pytest.mark.parametrize("wire", [None, *(pytest.param(w, marks=SLOW) for w in ("bf16", "int8"))])
def test_lost_worker_beside_a_change_of_the_loss_scale_only_its_leaves_run_again(
    step, wire, tmp_path
):
    """The gradient of step 5 overflows, so step 6 has half its loss scale."""
    dead = WorkerFault("backward", step=step, rank=1, nth=4, once=str(tmp_path / "dead"))
    spec = job_of_three(min_workers=2, wire=wire)
    train = counted(tmp_path, precision="fp16", large_loss=LARGE_LOSS)
    outcome, _ = group(spec, dies_last(train, tmp_path), faults=(dead,))
    assert sum(passes(tmp_path, step).values()) == VIRTUAL + 4
    assert outcome.digest == local(spec, train).digest
    scales = dict(line.split() for line in (tmp_path / "scales").read_text().splitlines())
    assert float(scales[str(SMALL_LOSS)]) == float(scales[str(LARGE_LOSS)]) / 2
