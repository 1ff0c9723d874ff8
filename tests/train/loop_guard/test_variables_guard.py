"""Variables of the loop's body: named where a worker that joins would lack them, carried by
ctx.carry, and an error where parameter groups differ."""

import argparse
import copy
import dataclasses
import enum
import itertools
import math
import random
import time

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader
from tqdm import tqdm

from elastic_dp.cluster.run_handle import error_of
from elastic_dp.errors import LoopError
from elastic_dp.train.fault_injection import WorkerFault
from tests.runs import ENDLESS, group, in_turn, local, resize, spec_of, texts_of, warnings_of
from tests.train.jobs import adamw, classifier, cross_entropy, hold
from tests.train.test_kills import with_faults


def begin(ctx, model=None, loss_fn=cross_entropy, **options):
    """The steps of a loop, between two of which it waits where a test wants it."""
    model = model or classifier()
    for step in ctx.steps(model, adamw(model), loss_fn, **options):
        yield step
        hold(ctx, step)


NAMED = {}


def named(words):
    """A train function, and how its variable is named."""

    def add(train):
        NAMED[train] = words
        return train

    return add


@named("value (0.0, then")
def last_evaluation(ctx):
    value = 0.0
    for step in begin(ctx):
        if step.number % 2 == 0:
            value = step.loss
        ctx.log({"value": value})


@named("args.lr (0.1, then 0.05)")
def in_args(ctx):
    args = argparse.Namespace(lr=0.1)
    for _ in begin(ctx):
        args.lr *= 0.5


@named("args.last (0, then 1)")
def in_many_args(ctx):
    args = argparse.Namespace(**{f"option_{n}": n for n in range(30)}, last=0)
    for _ in begin(ctx):
        args.last += 1


@named("rng")
def own_generator(ctx):
    rng = random.Random(0)
    for _ in begin(ctx):
        rng.random()


@named("wait (0, then 1)")
def helper_generator(ctx):
    def numbered():
        yield from begin(ctx)

    wait = 0
    for _ in numbered():
        wait = wait + 1


@named("ema")
def average_by_hand(ctx):
    model = classifier()
    ema = copy.deepcopy(model)
    for _ in begin(ctx, model):
        with torch.no_grad():
            for mine, p in zip(ema.parameters(), model.parameters(), strict=True):
                mine.mul_(0.9).add_(p, alpha=0.1)


@named("difficulty (0.0, then")
def curriculum(ctx):
    difficulty = 0.0

    def loss_fn(m, batch):
        return cross_entropy(m, batch) * (1 + difficulty)

    for _ in begin(ctx, loss_fn=loss_fn):
        difficulty = min(1.0, difficulty + 0.1)


@named("history")
def history(ctx):
    history = {"loss": [], "lr": []}
    for step in begin(ctx):
        history["loss"].append(step.loss)


@named("calls (0, then 1)")
def nonlocal_counter(ctx):
    calls = 0

    def after_step():
        nonlocal calls
        calls += 1

    for _ in begin(ctx):
        after_step()


@dataclasses.dataclass
class State:
    step: int = 0


@named("state.step (0, then 1)")
def dataclass_state(ctx):
    state = State()
    for _ in begin(ctx):
        state.step += 1


@dataclasses.dataclass
class Trainer:
    name: str = "first"
    state: State = dataclasses.field(default_factory=State)


@named("trainer.state.step (0, then 1)")
def object_beside_a_value_in_an_object(ctx):
    trainer = Trainer()
    for _ in begin(ctx):
        trainer.state.step += 1


class Within(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.settings = classifier(), State()
        self.masks = {"first": [torch.ones(2)]}

    def forward(self, x):
        return self.inner(x)


@named("model.settings.step (0, then 1), model.masks")
def objects_within_the_model(ctx):
    model = Within()
    for _ in begin(ctx, model=model):
        model.settings.step += 1
        model.masks["first"][0][0] = 0.0


@named("calls[0] (1, then 2) changes with each micro-batch")
def counter_in_a_loss_that_names_a_variable_without_a_value(ctx):
    calls = [0]

    def loss_fn(model, batch):
        calls[0] += 1
        return cross_entropy(model, batch) if calls else late

    for _ in begin(ctx, loss_fn=loss_fn):
        pass
    late = None


@dataclasses.dataclass(slots=True)
class Count:
    n: int = 0


@named("state.n (0, then 1)")
def state_in_slots(ctx):
    state = Count()
    for _ in begin(ctx):
        state.n += 1


COUNTER = 0


def counts_in_the_module():
    global COUNTER
    COUNTER += 1


@named("COUNTER (")
def global_counter(ctx):
    for _ in begin(ctx):
        counts_in_the_module()


class Args:
    lr = 0.01


@named("Args.lr (")
def class_attribute(ctx):
    for _ in begin(ctx):
        Args.lr *= 0.9


@named("i (0, then 1)")
def enumerated(ctx):
    for i, _ in enumerate(begin(ctx)):
        ctx.log({"i": i})


@named("lrs")
def lr_of_a_generator(ctx):
    lrs = (0.01 * 0.9**n for n in itertools.count())
    for _ in begin(ctx):
        ctx.log({"lr": next(lrs)})


@named("lrs")
def lr_of_an_iterator(ctx):
    lrs = iter([0.01 * 0.9**n for n in range(100)])
    for _ in begin(ctx):
        ctx.log({"lr": next(lrs)})


@named("lrs")
def lr_of_a_cycle(ctx):
    lrs = itertools.cycle([0.1, 0.01, 0.001])
    for _ in begin(ctx):
        ctx.log({"lr": next(lrs)})


@named("lrs")
def lr_of_a_mapped_iterator(ctx):
    lrs = enumerate(map(float, iter(range(100))))
    for _ in begin(ctx):
        ctx.log({"lr": next(lrs)[1]})


@named("others")
def batches_of_a_loader(ctx):
    others = iter(DataLoader(range(1000), batch_size=4))
    for _ in begin(ctx):
        ctx.log({"mean": next(others).float().mean()})


@named("others")
def batches_of_an_endless_loader(ctx):
    def endless(loader):
        while True:
            yield from loader

    others = endless(DataLoader(range(1000), batch_size=4))
    for _ in begin(ctx):
        ctx.log({"mean": next(others).float().mean()})


@named("others")
def batches_of_a_cycled_loader(ctx):
    others = itertools.cycle(DataLoader(range(1000), batch_size=4))
    for _ in begin(ctx):
        ctx.log({"mean": next(others).float().mean()})


@named("lr (0.01, then")
def lr_of_a_zip(ctx):
    for _, lr in zip(begin(ctx), [0.01 * 0.9**n for n in range(100)], strict=False):
        ctx.log({"lr": lr})


@named("losses")
def losses_in_an_array(ctx):
    losses = np.zeros(1000)
    for step in begin(ctx):
        losses[step.number] = step.loss


@named("total")
def tensor_written_as_data(ctx):
    total = torch.zeros(())
    for step in begin(ctx):
        total.data += step.loss


class Meter(nn.Module):
    total = 0.0

    def add(self, value):
        self.total += value


@named("meter")
def meter_of_a_module(ctx):
    meter = Meter()
    for step in begin(ctx):
        meter.add(step.loss)


@named("changes smooth (")
def average_that_the_first_body_makes(ctx):
    for step in begin(ctx):
        smooth = step.loss if step.number == 1 else 0.9 * smooth + 0.1 * step.loss  # noqa: F821
        ctx.log({"smooth": smooth})


@named("changes anchor (None, then")
def variable_that_one_body_makes(ctx):
    for step in begin(ctx):
        if step.number == 2:
            anchor = step.loss
        elif step.number > 2:
            ctx.log({"since": step.loss / anchor})


@named("changes best_weights")
def best_weights_after_the_loop(ctx):
    model, best_weights = classifier(), None
    for _ in begin(ctx, model):
        best_weights = {name: p.clone() for name, p in model.state_dict().items()}
    assert best_weights is not None


Phase = enum.Enum("Phase", "WARMUP MAIN")


@named("changes phase")
def phase(ctx):
    phase = Phase.WARMUP
    for step in begin(ctx):
        phase = Phase.MAIN if step.number == 3 else phase


@named("model.3.p (0.2, then 0.5)")
def dropout_that_grows_later(ctx):
    model = classifier()
    for step in begin(ctx, model):
        if step.number == 3:
            model[3].p = 0.5


@named("criterion")
def class_weights_that_change(ctx):
    criterion = nn.CrossEntropyLoss(weight=torch.ones(4))
    for step in begin(ctx, loss_fn=lambda m, batch: criterion(m(batch["x"]), batch["y"])):
        if step.number == 3:
            criterion.weight = torch.tensor([1.0, 2.0, 3.0, 4.0])


@pytest.mark.parametrize("train", NAMED, ids=lambda train: train.__name__)
def test_variable_that_the_body_changes_is_named_once(train):
    warnings = warnings_of(train)
    named = [text for text in warnings if NAMED[train] in text.partition(". A worker")[0]]
    assert len(named) == 1, warnings
    ways = ["ctx.carry(", "state={", "make it a buffer"]
    if train is own_generator:
        ways = [", draw from the global generators, which are seeded for each body"]
    assert any(way in named[0] for way in ways)


def assigned_before_it_is_read(ctx):
    ended, text = False, ""
    for step in begin(ctx):
        loss = step.loss
        text = f"{loss:.3f}"
        low = [x for x in (1.0, 2.0) if x < loss]
        if step.number % 3 == 0:
            mean = sum(low)
            ctx.log({"text": text, "low": low, "mean": mean, "ended": ended})
    assert loss


def clocks(ctx):
    began = time.time()
    last = time.perf_counter()
    for step in begin(ctx):
        ctx.log({"s": time.time() - began, "since": time.perf_counter() - last, "n": step.number})
        last = time.perf_counter()


def constants(ctx):
    config = {"every": 2, "names": ["a", "b"]}
    for step in begin(ctx):
        if step.number % config["every"] == 0:
            ctx.log({name: step.loss for name in config["names"]})


def passed(ctx):
    model = classifier()
    optimizer = adamw(model)
    ema, scheduler = AveragedModel(model), StepLR(optimizer, 2)
    for _ in ctx.steps(model, optimizer, cross_entropy, state={"e": ema, "s": scheduler}):
        ema.update_parameters(model)
        scheduler.step()


def carried(ctx):
    c = ctx.carry(best=math.inf, seen=[])
    for step in begin(ctx):
        c.best = min(c.best, step.loss)
        c.seen.append(step.number)


class Job:
    """Its method is the loss function, and its attributes travel."""

    def __init__(self):
        self.seen = 0

    def loss(self, model, batch):
        return cross_entropy(model, batch)

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


def object_of_the_loss(ctx):
    job = Job()
    for _ in begin(ctx, loss_fn=job.loss, state={"job": job}):
        job.seen += 1


def progress_bar(ctx):
    bar = tqdm(begin(ctx), disable=True)
    for step in bar:
        bar.set_postfix(loss=step.loss)


def scaler_that_is_disabled(ctx):
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for _ in begin(ctx, loss_fn=lambda m, batch: scaler.scale(cross_entropy(m, batch))):
        scaler.update()


def loop_by_next(ctx):
    model = classifier()
    optimizer = adamw(model)
    steps = ctx.steps(model, optimizer, cross_entropy)
    while (step := next(steps, None)) is not None:
        optimizer.param_groups[0]["lr"] = 0.01 / step.number
        hold(ctx, step)


def compiled_model_that_is_evaluated(ctx):
    model = classifier()
    compiled = torch.compile(model, backend="aot_eager")
    loss_fn = lambda m, batch: F.cross_entropy(compiled(batch["x"]), batch["y"])  # noqa: E731
    for step in begin(ctx, model, loss_fn):
        if step.number == 3:
            compiled.eval()
            compiled(torch.zeros(1, 16))
            compiled.train()


NOT_NAMED = [assigned_before_it_is_read, clocks, constants, passed, carried, object_of_the_loss]
EXACT = [progress_bar, scaler_that_is_disabled, loop_by_next, compiled_model_that_is_evaluated]


@pytest.mark.parametrize("train", [*NOT_NAMED, *EXACT], ids=lambda train: train.__name__)
def test_variable_that_travels_or_carries_nothing_is_not_named(train):
    assert warnings_of(train) == []


def average_in_the_body(ctx):
    model = classifier()
    ema = AveragedModel(model)
    for _ in begin(ctx, model):
        ema.update_parameters(model)


def carried_module(ctx):
    ctx.carry(ema=nn.Linear(1, 1))


def carried_in_the_loop(ctx):
    for _ in begin(ctx):
        ctx.carry(wait=0)


def key_of_carry(ctx):
    ctx.carry(wait=0)
    for _ in begin(ctx, state={"carry": nn.Linear(1, 1)}):
        pass


def clips_in_some_bodies(ctx):
    model = classifier()
    for step in begin(ctx, model):
        if step.number == 3:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def optimizer_that_goes_back(ctx, goes_back=None):
    model = classifier()
    optimizer = adamw(model)
    first = copy.deepcopy(optimizer.state_dict())
    for step in ctx.steps(model, optimizer, cross_entropy):
        if step.number == 3:
            optimizer.state.clear() if goes_back else optimizer.load_state_dict(first)


def optimizer_that_forgets(ctx):
    optimizer_that_goes_back(ctx, goes_back=True)


@pytest.mark.parametrize(
    ("train", "words"),
    [
        (average_in_the_body, 'state={"ema": ema}'),
        (carried_module, r'state={"ema": ema}'),
        (carried_in_the_loop, "Call it before the loop"),
        (key_of_carry, "give the object another one"),
        (clips_in_some_bodies, "clip_norm=1.0"),
        (optimizer_that_goes_back, "wrote to the optimizer's state"),
        (optimizer_that_forgets, "wrote to the optimizer's state"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_body_that_a_joiner_could_not_follow_raises(train, words):
    with pytest.raises(Exception, match=r"ctx|joins|optimizer") as refused:
        warnings_of(train)
    assert words in str(refused.value)


def stops_early(ctx):
    """Stops once the loss has not been under its best for some steps in all."""
    c = ctx.carry(best=math.inf, wait=0, history=[])
    for step in begin(ctx):
        c.history.append(step.number)
        c.wait += step.loss >= c.best
        c.best = min(c.best, step.loss)
        assert c.history == list(range(1, step.number + 1))
        if c.wait >= 7:
            ctx.stop(f"no better after {step.number} steps")


def test_run_stops_at_the_same_step_although_all_who_began_it_are_lost(tmp_path):
    spec = spec_of(steps=200, workers=2, config={"hold": {0: 2}})
    alone = local(spec, stops_early)
    # The second one has rank 0 then.
    faults = tuple(
        WorkerFault("backward", rank=0, world_size=2, step=step, once=str(tmp_path / f"{step}"))
        for step in (4, 8)
    )
    outcome, run = group(spec, stops_early, faults=faults)
    assert 8 < outcome.step < 200 and outcome.workers_lost == 2
    assert (outcome.step, outcome.digest) == (alone.step, alone.digest)
    assert not [text for text in texts_of(run) if "WARNING" in text]


@pytest.mark.slow
@pytest.mark.parametrize("train", EXACT, ids=lambda train: train.__name__)
def test_loop_is_exact_although_all_who_began_it_are_lost(train, tmp_path):
    faults = in_turn([{"rank": 0}] * 2, tmp_path, point="backward", world_size=2, settled=True)
    spec = spec_of(steps=ENDLESS, workers=2, config={"hold": {0: 2}})
    outcome, run = with_faults(spec, train, faults)
    assert outcome.workers_lost == 2
    assert outcome.digest == local(dataclasses.replace(spec, max_steps=outcome.step), train).digest
    assert not [text for text in texts_of(run) if "WARNING" in text]


def lowers_by_hand(ctx):
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    count = 0
    for step in ctx.steps(model, optimizer, cross_entropy):
        count = count + 1
        if count == 8:
            optimizer.param_groups[0]["lr"] *= 0.5
        hold(ctx, step)


def test_parameter_group_that_differs_names_field_values_and_who_joined():
    spec = spec_of(steps=40, workers=1, config={"hold": {0: 2}})
    outcome, run = group(spec, lowers_by_hand, script=[resize(1, 2)], fails=True)
    error = error_of(outcome)
    assert type(error) is LoopError, outcome.traceback
    for words in ("param_groups[0]['lr'] is 0.0", "joined after step", "ctx.carry", "w1", "w2"):
        assert words in str(error)
    assert any("count (0, then 1)" in text for text in texts_of(run))
