"""The worked examples of docs/architecture.md keep the guarantees that the page promises."""

import re
from functools import partial
from pathlib import Path

import pytest
import torch

import elastic_dp as edp
from elastic_dp.distributed.gradient_reducer import GradientReducer
from elastic_dp.errors import LossError, SpecError
from tests.distributed.members import (
    _dropped_here,  # noqa: F401
    finish,
    named,
    of_each,
    run_and_send,
)
from tests.runs import local, spec_of
from tests.train.jobs import classify, cross_entropy

PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"
CODE = {"edp": edp, "torch": torch}
for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S):
    if "\nclass " in "\n" + block:
        exec(block, CODE)
V = 6


def stopped_at(least_gb):
    def train(ctx):
        body = lambda step: ctx.log({"free_gb": step.metrics["free_gb"]})  # noqa: E731
        classify(ctx, body=body, participants=[CODE["DiskSpace"]("/", least_gb)])

    return local(spec_of(steps=4), train)


def test_participant_reports_a_metric_and_ends_the_run():
    going = stopped_at(0.0)
    assert len(going.logged) == 4 and going.logged[0]["free_gb"] > 0
    assert stopped_at(1e9).logged == []


@pytest.mark.parametrize(
    ("participants", "message"),
    [
        ([object()], "participants has a object"),
        ([CODE["DiskSpace"]("/", 0.0)] * 2, "disk_space"),
        ([type("Old", (edp.StepParticipant,), {"send": print})()], r"send in begin\(\)"),
    ],
)
def test_participants_that_cannot_be_used_are_refused(participants, message):
    with pytest.raises(SpecError, match=message):
        local(spec_of(steps=1), partial(classify, participants=participants))


def summed(group, shares):
    draw = torch.Generator().manual_seed(0)
    parameters = [torch.nn.Parameter(torch.zeros(n)) for n in (70, 3)]
    values = torch.randn(V, 73, generator=draw) * 1e-3
    gradients = GradientReducer(named(parameters), CODE["ScaledHalf"])
    gradients.open(group, shares, V, exact=True)
    run_and_send(
        gradients, shares[group.rank], V, lambda v: (torch.cat(parameters) * values[v]).sum()
    )
    assert finish(gradients, 1.0)
    assert torch.allclose(torch.cat([p.grad for p in parameters]), values.sum(0), atol=1e-5)
    return [p.grad.tolist() for p in parameters]


def test_rounding_has_the_bits_of_one_worker_on_any_number():
    (alone,) = of_each(1, lambda group: summed(group, [[(0, V)]]))
    for shares in ([[(0, 3)], [(3, 6)]], [[(0, 2)], [(2, 4)], [(4, 6)]]):
        of_all = of_each(len(shares), lambda group, shares=shares: summed(group, shares))
        assert of_all == [alone] * len(shares)


def test_rounding_of_a_job_rounds_its_gradients():
    rounded, spec = partial(classify, rounding=CODE["ScaledHalf"]), spec_of(steps=3)
    assert local(spec, rounded).digest != local(spec, classify).digest
    fast = spec_of(steps=3, exact=False)
    with pytest.raises(SpecError, match="exact=False"):
        local(fast, rounded)


def test_gradient_beyond_float16_is_an_error_that_names_the_rows():
    def train(ctx):
        loss = lambda model, batch: 1e4 * cross_entropy(model, batch)  # noqa: E731
        classify(ctx, loss, rounding=CODE["ScaledHalf"])

    with pytest.raises(LossError, match="gradient of step 1 is not finite"):
        local(spec_of(steps=1), train)
