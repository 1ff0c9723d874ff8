"""What every participant of a step must do: its verdict depends on the entries alone, `undo` leaves
nothing of the step, `commit` raises nothing. A new participant gets a line in `PARTICIPANTS`."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from elastic_dp.errors import GroupError, LoopError, ModelError
from elastic_dp.extensions.gangs import GradientOrders
from elastic_dp.train.gang import Gang
from elastic_dp.train.state.module_buffers import ModuleBuffers
from elastic_dp.train.step import participants as p
from elastic_dp.train.step.micro_batch import MicroBatchResult
from elastic_dp.train.step.step_gradient import StepGradient

STEP = 7


class Device:
    switched = False

    def __init__(self, connected, why_not=None):
        self.connected, self._why_not = connected, why_not
        self.told = None

    def connecting_failure(self):
        return self._why_not

    def agree(self, step, *, connected, why_not):
        self.told = step, connected, why_not


class Group:
    """A group of one rank, whose `all_gather` is never called."""

    world_size = 1

    def __init__(self):
        self.on_device = Device(True)


class Control:
    """What a step reads of `WorkerControl`."""

    stop_reason: str | None = None
    checkpoint_wanted = checkpoint_late = False


class Rows:
    """A data source with a bad row group for each virtual worker below 2."""

    def __init__(self):
        self.bad = []

    def bad_row_groups(self, step, v):
        return frozenset({v} if v < 2 else ())

    def check_bad(self, row_groups):
        if len(set(row_groups)) > 5:
            raise ValueError("too many")

    def mark_bad(self, row_groups):
        self.bad += row_groups

    def describe(self, step, v):
        return str(v)


def results_of(*numbers, bad=()):
    state = SimpleNamespace(loss_scale=None, bad_row_groups={*bad}, inexact_because=[])
    made = p.Results(state, Rows())
    made.begin(STEP)
    made.own = {v: MicroBatchResult(0.5 * v, 2.0, {"m": 1.0 + v}) for v in numbers}
    return made


def control(**values):
    made = Control()
    for name, value in values.items():
        setattr(made, name, value)
    return made


def flags(late, used):
    reducer = SimpleNamespace(late=late, used=used, drop=lambda: None, begin=lambda *_, **__: None)
    exchange = SimpleNamespace(finish=lambda *_: None, assign=lambda: None, divided_by=1)
    leaves = SimpleNamespace(
        gradients=reducer, is_observed=False, expected_weight=lambda _: 2.0, shares=None, scale=1.0
    )
    build = SimpleNamespace(leaves=leaves, gradients=reducer, exchange=exchange)
    build.results, build.state = results_of(0), SimpleNamespace(loss_scale=None)
    build.spec = SimpleNamespace(data=SimpleNamespace(seed=0))
    return StepGradient(build)


def weights(value):
    compared = p.WeightComparison({"w": torch.full((3,), value)}, every=2)
    compared.members = ("w1", "w2")
    return compared


def groups(lr):
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=lr)
    return p.ParameterGroups([optimizer], lambda: f"worker with {lr}")


def buffers(value):
    model = nn.BatchNorm1d(2)
    made = ModuleBuffers(model, lambda step: 2, lambda point, step: None)
    made.model = model
    made.writes = value
    return made


def write(participant):
    """A micro-batch of virtual worker 0 changes a buffer."""
    if isinstance(participant, ModuleBuffers):
        participant.model.running_mean.fill_(participant.writes)
        participant.after_leaf(0, contributes=True)


PARTICIPANTS = {
    "results": lambda i: results_of(2 * i, 2 * i + 1),
    "stop": lambda i: p.Wishes(control(stop_reason="enough" if i else None)),
    "no_wish": lambda i: p.Wishes(control()),
    "checkpoint": lambda i: p.Wishes(control(checkpoint_wanted=bool(i))),
    "late_checkpoint": lambda i: p.Wishes(control(checkpoint_wanted=True, checkpoint_late=bool(i))),
    "weights": lambda i: weights(1.0),
    "gradients": lambda i: flags(False, bytes([i, 1 - i, 0])),
    "late_gradients": lambda i: flags(bool(i), b"\1"),
    "devices": lambda i: p.DeviceConnections(),
    "parameter_groups": lambda i: groups(0.1),
    "buffers": lambda i: buffers(3.0),
}


def members(name):
    """The participant of each of two members, whose micro-batches have run."""
    made = [PARTICIPANTS[name](i) for i in (0, 1)]
    for one in made:
        one.open(Group())
        one.begin(STEP)
        write(one)
    if name == "results":  # `begin` forgets the results of the step before
        made = [PARTICIPANTS[name](i) for i in (0, 1)]
    return made


def seen(participant):
    """What a step leaves in a participant, as plain values."""
    plain = (bool, int, float, str, bytes, tuple, list, dict, frozenset, type(None))
    kept = ("_step", "_optimizers", "_parameters", "_own", "agreed")  # of the step before
    found = {k: v for k, v in vars(participant).items() if isinstance(v, plain) and k not in kept}
    model = getattr(participant, "model", None)
    return found, None if model is None else model.running_mean.tolist()


@pytest.mark.parametrize("name", PARTICIPANTS)
def test_verdict_depends_on_the_entries_alone(name):
    made = members(name)
    entries = [one.propose() for one in made]
    verdicts = [one.agree(entries) for one in made]
    assert verdicts[0] == verdicts[1]
    stranger = PARTICIPANTS[name](0)
    stranger.open(Group())
    stranger.begin(STEP)
    assert stranger.agree(entries) == verdicts[0]


@pytest.mark.parametrize("name", PARTICIPANTS)
def test_undo_leaves_nothing_of_the_step(name):
    fresh = PARTICIPANTS[name](1)
    fresh.open(Group())
    fresh.begin(STEP)
    fresh.undo()
    before = seen(fresh)
    first, second = members(name)
    entries = [first.propose(), second.propose()]
    second.agree(entries)
    second.undo()
    assert seen(second) == before
    second.undo()
    assert seen(second) == before


@pytest.mark.parametrize("name", PARTICIPANTS)
def test_commit_of_a_prepared_step_raises_nothing(name):
    other, one = members(name)
    if one.agree([other.propose(), one.propose()]) is None:
        one.prepare()
        one.commit()


def test_names_are_unique_in_a_step():
    kinds = {type(make(0)) for make in PARTICIPANTS.values()}
    assert len({kind.name for kind in kinds}) == len(kinds)
    of_a_plain_step = {
        kind
        for kind in p.StepParticipant.__subclasses__()
        if kind.__module__.startswith(("elastic_dp.train.step.", "elastic_dp.train.state."))
    }
    assert kinds == of_a_plain_step


def test_results_are_those_of_all_members_that_count():
    first, second = members("results")
    entries = [first.propose(), second.propose()]
    assert second.agree(entries) is None
    second.prepare()
    assert [(v, r.loss, r.metrics["m"]) for v, r in second.of_all.items()] == [
        (0, 0.0, 1.0),
        (1, 0.5, 2.0),
        (2, 1.0, 3.0),
        (3, 1.5, 4.0),
    ]


def test_a_stop_counts_before_a_retry():
    made = [p.Wishes(control(stop_reason="enough")), flags(True, b"")]
    for one in made:
        one.begin(STEP)
    record = p.propose_all(made)
    assert p.agree_all(made, [record, record]) == p.StopAgreed("enough")
    assert p.agree_all(made[1:], [record, record]) == p.RetryStep()
    assert p.agree_all([], [record]) is None


def test_stop_reason_of_any_bytes_travels():
    one = p.Wishes(control(stop_reason="\udcff ended"))
    one.begin(STEP)
    assert one.agree([b"", one.propose()]) == p.StopAgreed("\udcff ended")


def test_checkpoint_waits_for_a_member_that_still_writes():
    first, second = (PARTICIPANTS["late_checkpoint"](i) for i in (0, 1))
    first.agree([first.propose(), second.propose()])
    first.commit()
    assert (first.checkpoint, first.late, first._control.checkpoint_wanted) == (False, True, True)
    first.agree([first.propose()])
    first.commit()
    assert (first.checkpoint, first._control.checkpoint_wanted) == (True, False)


def test_bad_row_groups_are_skipped_from_the_commit_on():
    first, second = members("results")
    entries = [first.propose(), second.propose()]
    first.agree(entries)
    first.prepare()
    assert not first._state.bad_row_groups
    first.commit()
    assert first._state.bad_row_groups == {0, 1} == {*first._data.bad}
    _, new, _ = p.msgpack.unpackb(results_of(0, 1, bad={0}).propose())
    assert new == [1]


def test_weights_that_differ_end_the_generation():
    one, other = weights(1.0), weights(2.0)
    for each in (one, other):
        each.begin(STEP)
    entries = [one.propose(), other.propose()]
    assert all(entries)
    with pytest.raises(GroupError, match="weights of members differ"):
        one.agree(entries)


def test_parameter_groups_that_differ_are_named():
    one, other = groups(0.1), groups(0.2)
    fields = {f"worker w{n}": p.fields_of(each._optimizers) for n, each in enumerate((one, other))}
    records = [json.dumps(record).encode() for record in fields.items()]
    one.open(SimpleNamespace(gather_bytes=lambda own: records))
    one.begin(STEP)
    one.agree([one.propose(), other.propose()])
    with pytest.raises(LoopError, match=r"\['lr'\] is 0.1 on worker w0, and 0.2 on worker w1"):
        one.prepare()


@pytest.mark.parametrize(
    ("connected", "all_are"), [((True, True), True), ((True, False), False), ((False, True), False)]
)
def test_devices_are_connected_when_each_member_says_so(connected, all_are):
    devices = [Device(one, None if one else "no route") for one in connected]
    made = [p.DeviceConnections() for _ in devices]
    for one, device in zip(made, devices, strict=True):
        one.open(SimpleNamespace(on_device=device))
        one.begin(STEP)
    entries = [one.propose() for one in made]
    made[0].agree(entries)
    assert devices[0].told == (STEP, all_are, None if all_are else "no route")


class Told:
    """The processes of a worker: this one, and others whose payloads are known."""

    def __init__(self, *others):
        self.others = others

    def exchange(self, payload):
        return [payload, *self.others]


@pytest.mark.parametrize("same", [True, False])
def test_gradients_in_other_orders_on_a_process_of_a_worker_are_refused(same):
    gang = Gang(0, 2, None, Told())
    one, other = GradientOrders(gang), GradientOrders(gang)
    for orders, indices in ((one, (0, 1)), (other, (0, 1) if same else (1, 0))):
        orders.begin(STEP)
        for index in indices:
            orders.note(index)
    entries = [one.propose(), other.propose(), b"else", b"else"]
    if same:
        assert one.agree(entries) is None
    else:
        with pytest.raises(ModelError, match="different orders"):
            one.agree(entries)


def test_record_of_a_worker_has_the_entries_of_all_its_processes():
    """Process i of all workers use their communicator from the same step on, or none does."""
    device, other = Device(True), p.DeviceConnections()
    other.open(SimpleNamespace(on_device=Device(False, "no route")))
    other.begin(STEP)
    (second,) = p.msgpack.unpackb(p.propose_all([other]))
    one = p.DeviceConnections()
    one.open(SimpleNamespace(on_device=device))
    one.begin(STEP)
    gang = Gang(0, 2, None, Told(second))
    p.agree_all([one], [p.propose_all([one], gang)])
    assert device.told == (STEP, False, "no route")


def test_buffers_become_the_mean_at_the_commit_and_are_put_back_without():
    one = buffers(3.0)
    one.open(Group())
    one.begin(STEP)
    write(one)
    assert one.model.running_mean.tolist() == [0.0, 0.0]
    one.agree([one.propose()])
    one.prepare()
    one.commit()
    assert one.model.running_mean.tolist() == [3.0, 3.0]
