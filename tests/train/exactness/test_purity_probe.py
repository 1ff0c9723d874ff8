"""What is made of a micro-batch that gives another result when it is run again."""

import contextlib
import functools
from collections import deque

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from elastic_dp.errors import LossError
from elastic_dp.train.exactness.facts import Look, facts_of
from elastic_dp.train.step.trial_run import ProbeOutcome, TrialRun
from tests.runs import local, spec_of, warnings_of
from tests.train.jobs import Kept, adamw, classifier, classify, cross_entropy, loop

CPU, GPU = torch.device("cpu"), torch.device("cuda")


class Unsteady(TrialRun):
    """Each run has another loss."""

    def __init__(self, exact=True, device=CPU):
        self.exact, self.device, self.runs = exact, device, 0
        self._written, self._tolerates = None, contextlib.nullcontext

    def run_trial(self):
        self.runs += 1
        return ProbeOutcome({}, {"the loss": str(self.runs)}, {}, {})

    def holds(self):
        return {}, {}

    def _undo(self, *, tried=False):
        pass


@pytest.fixture(autouse=True)
def _settings():
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def test_probe_with_another_loss_is_refused_by_name():
    with pytest.raises(LossError, match=r"gave the loss \(1, then 2\)"):
        Unsteady().probe([], print)


@pytest.mark.parametrize(("device", "because"), [(GPU, []), (CPU, ["scatter has no such kernel"])])
def test_probe_with_another_loss_on_nondeterministic_kernels_makes_the_run_inexact(device, because):
    told, before = [], len(because)
    Unsteady(device=device).probe(because, told.append)
    assert because[before:] == ["one micro-batch, run twice, gave the loss (1, then 2)"]
    assert len(told) == 1 and "not exact" in told[0]


def test_cudnn_benchmark_makes_a_run_on_a_gpu_inexact(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    for device, found in ((CPU, 0), (GPU, 1)):
        runs, because = Unsteady(device=device), []
        runs.run_trial = lambda: None
        runs.probe(because, print)
        assert because == ["torch.backends.cudnn.benchmark was turned on"] * found


class Counts:
    calls = 0

    def loss(self, model, batch):
        self.calls += 1
        return cross_entropy(model, batch)

    __call__ = loss


@pytest.mark.parametrize("of", [lambda c: c, lambda c: c.loss, lambda c: functools.partial(c.loss)])
def test_a_count_of_an_object_that_is_the_loss_function_is_said(of):
    warnings = warnings_of(lambda ctx: classify(ctx, of(Counts())))
    assert any("loss_fn.calls (1, then 2) changes" in text for text in warnings)


def test_probe_with_another_loss_in_fast_mode_warns():
    told, because = [], []
    Unsteady(exact=False).probe(because, told.append)
    assert because == [] and "gave the loss (1, then 2)" in told[0]


def test_a_run_in_fast_mode_with_an_own_generator_is_warned_and_goes_on():
    rng = np.random.default_rng(0)

    def train(ctx):
        loss_fn = lambda m, b: cross_entropy(m, b) * (0.5 + rng.random())  # noqa: E731
        classify(ctx, loss_fn)

    warnings = warnings_of(train, exact=False)
    assert any("What changed meanwhile: rng" in text for text in warnings)


def test_probe_leaves_no_trace_in_the_result():
    """Buffers, gradients and random numbers are as if it had not been."""

    def train(ctx, probed=True):
        model = nn.Sequential(
            nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Dropout(0.2), nn.Linear(32, 4)
        )
        if not probed:
            ctx._session.is_source = False  # it warms up, as a worker that joins does
        loop(ctx, model, adamw(model))

    spec = spec_of(steps=3, workers=1)
    assert local(spec, train).digest == local(spec, lambda ctx: train(ctx, False)).digest


def test_facts_follow_values_and_not_objects():
    def seen(value):
        return facts_of("x", value)

    assert seen(torch.ones(3)) == seen(torch.ones(3)) != seen(torch.zeros(3))
    assert seen(np.ones(3)) == seen(np.ones(3)) != seen(np.zeros(3))
    assert seen([1, {"a": float("nan")}]) == seen([1, {"a": float("nan")}]) != seen([1, {"a": 2.0}])
    rng = np.random.default_rng(0)
    before = seen(rng)
    assert seen(rng) == before
    rng.random()
    assert seen(rng) != before
    assert seen(object()) == seen(nn.Linear(2, 2)) == seen(torch.ones(2).to_sparse()) == {}


def test_schedulers_within_the_one_that_is_passed_and_unused_ones_are_not_accused():
    def train(ctx):
        model = classifier()
        optimizer = adamw(model)
        unused = lr_scheduler.StepLR(optimizer, 3)
        parts = [lr_scheduler.ConstantLR(optimizer), lr_scheduler.StepLR(optimizer, 1)]
        scheduler = lr_scheduler.SequentialLR(optimizer, parts, [2])
        for _ in ctx.steps(model, optimizer, cross_entropy, scheduler=scheduler):
            pass
        assert unused.last_epoch == 0 and parts[1].last_epoch > 0

    assert warnings_of(train) == []


class Warmed(torch.optim.SGD):
    """Has a scheduler of its own, which it steps itself."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)
        self.warmup = lr_scheduler.LinearLR(self, total_iters=3)

    def step(self):
        super().step()
        self.warmup.step()


@pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler:UserWarning")
def test_scheduler_that_the_optimizer_holds_is_not_accused():
    def train(ctx):
        model = classifier()
        for _ in ctx.steps(model, Warmed(model.parameters()), cross_entropy):
            pass

    assert warnings_of(train) == []


def test_numbers_that_are_equal_to_what_is_passed_are_looked_at():
    """Small integers are one object each."""

    def train(ctx):
        model, temperature = classifier(), 1
        loss_fn = lambda m, b: cross_entropy(m, b) / temperature  # noqa: E731
        for _ in ctx.steps(model, adamw(model), loss_fn, state={"one": Kept(1)}):
            temperature += 1

    assert any("changes temperature (1, then 2)" in text for text in warnings_of(train))


def test_loss_that_writes_parameters_back_is_not_accused():
    def train(ctx):
        def loss_fn(m, batch):
            with torch.no_grad():
                before = [p.clone() for p in m.parameters()]
                for p in m.parameters():
                    p.mul_(0.5)
                calm = m(batch["x"])
                for p, value in zip(m.parameters(), before, strict=True):
                    p.copy_(value)
            return cross_entropy(m, batch) + (m(batch["x"]) - calm).square().mean()

        classify(ctx, loss_fn)

    assert warnings_of(train) == []


def test_containers_may_change_while_they_are_looked_at():
    """Another thread of the user may change them."""
    values = {"held": object(), "next": 1}, [object(), 1]

    def changes(name, value):
        values[0]["more"] = 2
        values[1].append(2)
        return iter(())

    look = Look(others=changes)
    assert look.facts_of("d", values[0]) == {"len(d)": "2", "d['next']": "1"}
    assert look.facts_of("l", values[1])["l[1]"] == "1"


class WithoutText:
    """A key of a dict whose text takes long, as that of a tensor on a device."""

    def __repr__(self):
        raise AssertionError("asked for")


def freed():
    one = torch.ones(100_000)
    one.untyped_storage().resize_(0)
    return one


def itself():
    held = [None]
    held[0] = (one for one in held)
    return held[0]


ODD = {
    "conj": lambda: torch.ones(10, dtype=torch.complex64).conj(),
    "negative": lambda: torch.ones(10, dtype=torch.complex64).conj().imag,
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "freed": freed,
    "expanded": lambda: torch.ones(1).expand(100_000),
    "meta": lambda: torch.ones(100_000, device="meta"),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "itself": itself,
    "key without a text": lambda: {WithoutText(): 1},
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", ODD)
def test_odd_values_are_looked_at_without_an_error(name):
    for nbytes in (8, 1 << 16):  # as around a body, and more
        facts = Look(nbytes=nbytes).facts_of("x", ODD[name]())
        assert all(fact.startswith(("x", "len(x")) for fact in facts)


def test_items_by_other_keys_than_plain_values_are_told_apart():
    assert {"x['#1']", "x[#1]", "x[1]"} <= {*facts_of("x", {1: 1, WithoutText(): 2, "#1": 3})}


def test_of_a_large_container_the_first_items_are_looked_at_and_nothing_deeper():
    large = {number: [number] for number in range(1000)}
    facts = facts_of("x", large)
    assert facts["len(x)"] == "1000" and facts["len(x[0])"] == "1" and "x[0][0]" not in facts
    assert len(facts) < 10
    assert facts_of("x", deque(range(1000)))["x[3]"] == "3"
