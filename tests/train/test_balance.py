"""Virtual workers dealt by measured speed, in real processes; and how the speed is measured."""

import torch

from elastic_dp.train.step.compute_speed import STEPS, ComputeSpeed
from tests.patience import eventually
from tests.runs import formed_of, group, local, spec_of
from tests.train.jobs import adamw, classifier, cross_entropy


def second_is_slow(ctx):
    """By a clock that goes on with each virtual worker alone, so a busy machine makes nobody
    slower."""
    model, clock, first = classifier(), [0.0], 0  # the generation in which they are measured

    def loss_fn(m, batch):
        if ctx.world_size == 2:  # not alone: that run is for its weights
            ctx._session.transaction.leaves.speed._instant = lambda: clock[0]
            clock[0] += 0.02 if ctx.rank == 1 else 0.01
        return cross_entropy(m, batch)

    control = ctx._session.control
    for step in ctx.steps(model, adamw(model), loss_fn):
        first = first or ctx.generation
        if step.number == 20 and ctx.world_size == 2:
            was_first = ctx.generation == first
            eventually(lambda w=was_first: not w or control._over() or control._planned)


def test_a_worker_of_half_the_speed_runs_half_as_many():
    spec = spec_of(steps=50, workers=2, virtual=6, min_workers=2, balance="measured")
    outcome, run = group(spec, second_is_slow)
    membership = run.controller.coordinator.membership
    assert [member.num_virtual_workers for member in membership.members] == [4, 2]
    assert len(formed_of(run)) == 2
    assert not outcome.inexact_because
    assert outcome.digest == local(spec, second_is_slow).digest


def test_speed_told_is_the_median_of_the_last_steps_of_a_generation():
    told = []
    speed = ComputeSpeed(torch.device("cpu"), told.append)
    speed._instant = iter(x for n in range(100) for x in (n, n + (50 if n == 0 else 2))).__next__

    def step(virtual_workers):
        speed.begin()
        for _ in range(virtual_workers):
            speed.start_micro_batch()
            speed.end_micro_batch()
        speed.end_micro_batch()  # nothing was begun
        speed.end_step()

    speed.open()
    for n in range(STEPS):
        assert told == [0.0], n
        step(2)
    assert told == [0.0, 2.0], "one step took long"
    speed.open()
    step(0)
    step(1)
    assert told == [0.0, 2.0, 0.0], "the new generation's own"


def test_a_step_that_is_done_again_counts_once():
    told = []
    speed = ComputeSpeed(torch.device("cpu"), told.append)
    for _ in range(STEPS):
        speed.begin()
        speed.start_micro_batch()
        speed.begin()
        speed._instants += [1.0, 4.0]
        speed.end_step()
    assert told == [3.0]


def test_speed_without_a_listener_is_not_measured():
    speed = ComputeSpeed(torch.device("cpu"), None)
    speed.open()
    speed.begin()
    speed.start_micro_batch()
    speed.end_micro_batch()
    speed.end_step()
    assert not speed._instants and not speed._steps
