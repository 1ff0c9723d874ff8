"""Training loops as people write them: what each comes to when workers that began it are lost.

`exact`: the bits of the run that nothing disturbs. `said`: a warning names the variable, in the
first bodies. `refused`: one typed error, before a weight is wrong.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import enum
import functools
import itertools
import math
import os
import tempfile
import time
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader
from tqdm import tqdm

from elastic_dp.errors import LoopError, LossError
from tests.train.jobs import adamw, classifier, cross_entropy

STEPS = 18
LOOPS: dict[str, Any] = {}
Train = Callable[[Any], None]


def exact(train: Train) -> Train:
    LOOPS[train.__name__] = (train, None, None)
    return train


def said(words: str) -> Callable[[Train], Train]:
    return refused(None, words)


def refused(error: type[Exception] | None, words: str) -> Callable[[Train], Train]:
    def listed(train: Train) -> Train:
        LOOPS[train.__name__] = (train, error, words)
        return train

    return listed


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = classifier()
    return model, adamw(model)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


# ------------------------------------------------------------------------------------------ exact


@exact
def mnist_like(ctx):
    model, optimizer = made()
    scheduler = StepLR(optimizer, step_size=5, gamma=0.7)
    log_interval = 4
    for step in ctx.steps(model, optimizer, cross_entropy, scheduler=scheduler):
        if step.number % log_interval == 0:
            ctx.log({"loss": step.loss, "epoch": step.epoch})


@exact
def early_stopping_that_travels(ctx):
    model, optimizer = made()
    c = ctx.carry(best=math.inf, wait=0)
    for step in ctx.steps(model, optimizer, cross_entropy):
        c.wait = 0 if step.loss < c.best else c.wait + 1
        c.best = min(c.best, step.loss)
        if c.wait == 6:
            ctx.stop("no better")


@exact
def lr_by_a_formula(ctx):
    model, optimizer = made()
    for step in ctx.steps(model, optimizer, cross_entropy):
        set_lr(optimizer, 0.01 * 0.5 * (1 + math.cos(math.pi * step.number / STEPS)))


@exact
def plateau(ctx):
    model, optimizer = made()
    scheduler = ReduceLROnPlateau(optimizer, patience=1, threshold=0.5)
    for step in ctx.steps(model, optimizer, cross_entropy, state={"plateau": scheduler}):
        scheduler.step(step.loss)


@exact
def warmup_then_cosine(ctx):
    model, optimizer = made()
    warmup = LinearLR(optimizer, 0.1, total_iters=4)
    cosine = CosineAnnealingLR(optimizer, STEPS - 4)
    scheduler = SequentialLR(optimizer, [warmup, cosine], [4])
    for _ in ctx.steps(model, optimizer, cross_entropy, scheduler=scheduler):
        pass


@exact
def one_cycle(ctx):
    model, optimizer = made()
    scheduler = OneCycleLR(optimizer, 0.05, total_steps=ctx.total_steps)
    for _ in ctx.steps(model, optimizer, cross_entropy, scheduler=scheduler):
        pass


@exact
def averaged_model_that_teaches(ctx):
    model, optimizer = made()
    ema = AveragedModel(model)

    def loss_fn(m, batch):
        with torch.no_grad():
            taught = ema(batch["x"])
        return cross_entropy(m, batch) + 0.1 * F.mse_loss(m(batch["x"]), taught)

    for step in ctx.steps(model, optimizer, loss_fn, state={"ema": ema}):
        if step.number >= 4:
            ema.update_parameters(model)


@exact
def lr_finder(ctx):
    model, optimizer = made()
    c = ctx.carry(best=math.inf)
    for step in ctx.steps(model, optimizer, cross_entropy):
        set_lr(optimizer, 1e-4 * 1.5**step.number)
        c.best = min(c.best, step.loss)
        if step.loss > 4 * c.best:
            ctx.stop("diverges")


@exact
def mixed_precision(ctx):
    model, optimizer = made()
    for _ in ctx.steps(model, optimizer, cross_entropy, precision="bf16", clip_norm=1.0):
        pass


@exact
def class_weights(ctx):
    model, optimizer = made()
    weights = torch.tensor([1.0, 2.0, 0.5, 1.0])

    def loss_fn(m, batch):
        return F.cross_entropy(m(batch["x"]), batch["y"], weight=weights)

    for _ in ctx.steps(model, optimizer, loss_fn):
        pass


@exact
def curriculum_that_travels(ctx):
    model, optimizer = made()
    c = ctx.carry(share=0.25)

    def loss_fn(m, batch):
        losses = F.cross_entropy(m(batch["x"]), batch["y"], reduction="none")
        return losses.sort().values[: max(1, int(c.share * len(losses)))].mean()

    for step in ctx.steps(model, optimizer, loss_fn):
        c.share = min(1.0, c.share + (0.1 if step.loss < 2 else 0.05))


@exact
def layers_that_freeze(ctx):
    model, optimizer = made()
    for step in ctx.steps(model, optimizer, cross_entropy):
        if step.number == 3:
            model[0].requires_grad_(False)
        if step.number == 11:
            model[0].requires_grad_(True)


@exact
def saves_in_the_body(ctx):
    model, optimizer = made()
    for step in ctx.steps(model, optimizer, cross_entropy):
        if step.number % 4 == 0:
            with tempfile.TemporaryDirectory() as folder:
                path = os.path.join(folder, "model.pt")
                torch.save({"model": model.state_dict(), "step": step.number}, path)


@exact
def progress_bar(ctx):
    model, optimizer = made()
    bar = tqdm(ctx.steps(model, optimizer, cross_entropy), disable=True)
    for step in bar:
        bar.set_postfix(loss=step.loss)


@exact
def stops_by_the_clock(ctx):
    model, optimizer = made()
    began = time.time()
    for _ in ctx.steps(model, optimizer, cross_entropy):
        if time.time() - began > 3600:
            ctx.stop("an hour")


@exact
def random_augmentation(ctx):
    model, optimizer = made()

    def loss_fn(m, batch):
        x = batch["x"] + 0.1 * torch.randn_like(batch["x"])
        x = x * (torch.rand(len(x), 1) > 0.1)
        return F.cross_entropy(m(x), batch["y"])

    for _ in ctx.steps(model, optimizer, loss_fn):
        pass


@exact
def mixup(ctx):
    model, optimizer = made()

    def loss_fn(m, batch):
        share = float(np.random.beta(0.4, 0.4))
        order = torch.from_numpy(np.random.permutation(len(batch["x"])))
        out = m(share * batch["x"] + (1 - share) * batch["x"][order])
        one, other = (F.cross_entropy(out, y) for y in (batch["y"], batch["y"][order]))
        return share * one + (1 - share) * other

    for _ in ctx.steps(model, optimizer, loss_fn):
        pass


@exact
def distillation(ctx):
    model, optimizer = made()
    teacher = copy.deepcopy(model).eval().requires_grad_(False)

    def loss_fn(m, batch):
        student = F.log_softmax(m(batch["x"]), 1)
        return F.kl_div(student, F.softmax(teacher(batch["x"]), 1), reduction="batchmean")

    for _ in ctx.steps(model, optimizer, loss_fn):
        pass


@exact
def scaler_that_is_disabled(ctx):
    model, optimizer = made()
    scaler = torch.amp.GradScaler("cpu", enabled=False)

    def loss_fn(m, batch):
        return scaler.scale(cross_entropy(m, batch))

    for _ in ctx.steps(model, optimizer, loss_fn):
        scaler.update()


@exact
def loop_by_next(ctx):
    model, optimizer = made()
    steps = ctx.steps(model, optimizer, cross_entropy)
    while (step := next(steps, None)) is not None:
        set_lr(optimizer, 0.01 / step.number)


@exact
def compiled_model_that_is_evaluated(ctx):
    model, optimizer = made()
    compiled = torch.compile(model, backend="aot_eager")

    def loss_fn(m, batch):
        return F.cross_entropy(compiled(batch["x"]), batch["y"])

    for step in ctx.steps(model, optimizer, loss_fn):
        if step.number == 5:
            compiled.eval()
            compiled(torch.zeros(1, 16))
            compiled.train()


# ------------------------------------------------------------------------------------------- said


@said("best (inf, then")
def early_stopping(ctx):
    model, optimizer = made()
    best, patience = math.inf, 0
    for step in ctx.steps(model, optimizer, cross_entropy):
        if step.loss < best:
            best, patience = step.loss, 0
        else:
            patience += 1
        if patience > 5:
            ctx.stop("no better")


@said("wait (0, then 1)")
def lr_lowered_by_hand(ctx):
    model, optimizer = made()
    lr, wait = 0.01, 0
    for _ in ctx.steps(model, optimizer, cross_entropy):
        wait = wait + 1
        if wait % 4 == 0:
            lr *= 0.5
            set_lr(optimizer, lr)


@said("ema")
def average_by_hand(ctx):
    model, optimizer = made()
    ema = copy.deepcopy(model)
    for _ in ctx.steps(model, optimizer, cross_entropy):
        with torch.no_grad():
            for mine, p in zip(ema.parameters(), model.parameters(), strict=True):
                mine.mul_(0.9).add_(p, alpha=0.1)


@said("best_loss (inf, then")
def best_model(ctx):
    model, optimizer = made()
    best_loss, best_state = math.inf, None
    for step in ctx.steps(model, optimizer, cross_entropy):
        if step.loss < best_loss:
            best_loss, best_state = step.loss, copy.deepcopy(model.state_dict())
    model.load_state_dict(best_state)


@said("difficulty (0.0, then")
def curriculum(ctx):
    model, optimizer = made()
    difficulty = 0.0

    def loss_fn(m, batch):
        return cross_entropy(m, batch) * (1 + difficulty)

    for _ in ctx.steps(model, optimizer, loss_fn):
        difficulty = min(1.0, difficulty + 0.1)


@said("history")
def history(ctx):
    model, optimizer = made()
    history = {"loss": [], "lr": []}
    for step in ctx.steps(model, optimizer, cross_entropy):
        history["loss"].append(step.loss)
        if len(history["loss"]) > 3 and history["loss"][-1] > history["loss"][-3]:
            set_lr(optimizer, 0.001)


@said("running (0.0, then")
def running_average(ctx):
    model, optimizer = made()
    running = 0.0
    for step in ctx.steps(model, optimizer, cross_entropy):
        running = 0.9 * running + 0.1 * step.loss
        if running > 10:
            ctx.stop("diverges")


@said("window")
def window(ctx):
    model, optimizer = made()
    window = collections.deque(maxlen=4)
    for step in ctx.steps(model, optimizer, cross_entropy):
        window.append(step.loss)
        set_lr(optimizer, 0.01 / (1 + sum(window)))


@said("calls (0, then 1)")
def nonlocal_counter(ctx):
    model, optimizer = made()
    calls = 0

    def after_step():
        nonlocal calls
        calls += 1
        set_lr(optimizer, 0.01 / calls)

    for _ in ctx.steps(model, optimizer, cross_entropy):
        after_step()


@dataclasses.dataclass
class State:
    step: int = 0
    lr: float = 0.01


@said("state.step (0, then 1)")
def dataclass_state(ctx):
    model, optimizer = made()
    state = State()
    for _ in ctx.steps(model, optimizer, cross_entropy):
        state.step += 1
        set_lr(optimizer, state.lr / state.step)


COUNTER = 0


def counts_in_the_module():
    global COUNTER
    COUNTER += 1
    return COUNTER


@said("COUNTER (")
def global_counter(ctx):
    model, optimizer = made()
    for _ in ctx.steps(model, optimizer, cross_entropy):
        set_lr(optimizer, 0.01 / counts_in_the_module())


class Args:
    lr = 0.01


@said("Args.lr (")
def class_attribute(ctx):
    model, optimizer = made()
    for _ in ctx.steps(model, optimizer, cross_entropy):
        Args.lr *= 0.9
        set_lr(optimizer, Args.lr)


@said("i (0, then 1)")
def enumerated(ctx):
    model, optimizer = made()
    for i, _ in enumerate(ctx.steps(model, optimizer, cross_entropy)):
        set_lr(optimizer, 0.01 / (i + 1))


@said("lrs")
def lr_of_a_generator(ctx):
    model, optimizer = made()
    lrs = (0.01 * 0.9**n for n in itertools.count())
    for _ in ctx.steps(model, optimizer, cross_entropy):
        set_lr(optimizer, next(lrs))


@said("lrs")
def lr_of_an_iterator(ctx):
    model, optimizer = made()
    lrs = iter([0.01 * 0.9**n for n in range(100)])
    for _ in ctx.steps(model, optimizer, cross_entropy):
        set_lr(optimizer, next(lrs))


@said("smoothing (0.2, then")
def label_smoothing(ctx):
    model, optimizer = made()
    smoothing = 0.2

    def loss_fn(m, batch):
        return F.cross_entropy(m(batch["x"]), batch["y"], label_smoothing=smoothing)

    for step in ctx.steps(model, optimizer, loss_fn):
        smoothing = 0.2 * (1 - step.number / STEPS)


@said("size (8, then")
def progressive_sizes(ctx):
    model, optimizer = made()
    size = 8

    def loss_fn(m, batch):
        x = torch.where(torch.arange(16) < size, batch["x"], 0.0)
        return F.cross_entropy(m(x), batch["y"])

    for step in ctx.steps(model, optimizer, loss_fn):
        size = 8 + step.number // 2


@said("model.seen (0, then 1)")
def attribute_of_the_model(ctx):
    model, optimizer = made()
    model.seen = 0
    for _ in ctx.steps(model, optimizer, cross_entropy):
        model.seen += 1


@said("lrs")
def lr_of_a_cycle(ctx):
    model, optimizer = made()
    lrs = itertools.cycle([0.01, 0.003])
    for _ in ctx.steps(model, optimizer, cross_entropy):
        set_lr(optimizer, next(lrs))


@said("lr (0.01, then")
def lr_of_a_zip(ctx):
    model, optimizer = made()
    lrs = [0.01 * 0.9**n for n in range(100)]
    for _, lr in zip(ctx.steps(model, optimizer, cross_entropy), lrs, strict=False):
        set_lr(optimizer, lr)


@said("rows")
def rows_of_a_loader(ctx):
    model, optimizer = made()
    rows = iter(DataLoader(list(range(100)), batch_size=4))
    for _ in ctx.steps(model, optimizer, cross_entropy):
        set_lr(optimizer, 0.01 / (1 + next(rows).sum().item()))


@said("losses")
def losses_in_an_array(ctx):
    model, optimizer = made()
    losses = np.zeros(1000)
    for step in ctx.steps(model, optimizer, cross_entropy):
        losses[step.number] = step.loss
        set_lr(optimizer, 0.01 / (1 + losses.sum()))


@said("total")
def tensor_written_as_data(ctx):
    model, optimizer = made()
    total = torch.zeros(())
    for step in ctx.steps(model, optimizer, cross_entropy):
        total.data += step.loss
        set_lr(optimizer, 0.01 / (1 + float(total)))


class Meter(nn.Module):
    def __init__(self):
        super().__init__()
        self.total = 0.0

    def add(self, value):
        self.total += value


@said("meter")
def meter_of_a_module(ctx):
    model, optimizer = made()
    meter = Meter()
    for step in ctx.steps(model, optimizer, cross_entropy):
        meter.add(step.loss)
        set_lr(optimizer, 0.01 / (1 + meter.total))


@said("meter.total (1.0, then 2.0) changes with each micro-batch")
def meter_in_the_loss(ctx):
    model, optimizer = made()
    meter = Meter()

    def loss_fn(m, batch):
        meter.add(1.0)
        return cross_entropy(m, batch)

    for _ in ctx.steps(model, optimizer, loss_fn):
        ctx.log({"rows": meter.total})


def counter():
    count = 0

    def counted():
        nonlocal count
        count += 1
        return count

    return counted


@said("changes smooth (")
def average_that_the_first_body_makes(ctx):
    model, optimizer = made()
    for step in ctx.steps(model, optimizer, cross_entropy):
        smooth = step.loss if step.number == 1 else 0.9 * smooth + 0.1 * step.loss  # noqa: F821
        set_lr(optimizer, 0.01 * min(1.0, smooth))


@said("changes previous (")
def loss_of_the_step_before(ctx):
    model, optimizer = made()
    for step in ctx.steps(model, optimizer, cross_entropy):
        try:
            worse = step.loss > previous
        except NameError:
            worse = False
        set_lr(optimizer, 0.005 if worse else 0.01)
        previous = step.loss  # noqa: F841


@exact
def names_that_each_body_makes_anew(ctx):
    model, optimizer = made()
    for step in ctx.steps(model, optimizer, cross_entropy):
        losses = [step.loss * k for k in range(3)]
        if step.number % 3 == 0:
            mean = sum(losses) / 3
            ctx.log({"mean": mean, "loss": losses[-1]})


@said("changes anchor (None, then")
def variable_that_one_body_makes(ctx):
    model, optimizer = made()
    for step in ctx.steps(model, optimizer, cross_entropy):
        if step.number == 5:
            anchor = step.loss
        elif step.number > 5:
            set_lr(optimizer, 0.01 * min(1.0, step.loss / anchor))


@exact
def rates_of_groups(ctx):
    model, optimizer = made()
    for g in optimizer.param_groups:
        g["initial_lr"] = g["lr"]
    loss, ended = 0.0, False
    for step in ctx.steps(model, optimizer, cross_entropy):
        for g in optimizer.param_groups:
            g["lr"] = g["initial_lr"] * min(1.0, step.number / 6)
        loss = step.loss
        ctx.log({"loss": loss, "ended": ended})


@said("changes best_weights")
def best_weights_after_the_loop(ctx):
    model, optimizer = made()
    best_weights = None
    for _ in ctx.steps(model, optimizer, cross_entropy):
        best_weights = {name: p.clone() for name, p in model.state_dict().items()}
    assert best_weights is not None


@said("changes settings, counts, table, bank")
def state_deep_in_dicts_and_large_containers(ctx):
    model, optimizer = made()
    settings = {"a": {"b": {"c": {"n": 0}}}}
    counts, table, bank = [0] * 500, np.zeros((200, 200)), torch.zeros(200, 200)
    for step in ctx.steps(model, optimizer, cross_entropy):
        settings["a"]["b"]["c"]["n"] += 1
        counts[100 + step.number] += 1
        table[3, 4] += 1
        bank.data[3, 4] += 1
        n = settings["a"]["b"]["c"]["n"] + sum(counts) + table.sum() + float(bank.sum())
        set_lr(optimizer, 0.01 / (1 + n))


@said("EDP_TEST_PHASE in os.environ (")
def phase_in_the_environment(ctx):
    model, optimizer = made()
    try:
        for step in ctx.steps(model, optimizer, cross_entropy):
            set_lr(optimizer, 0.01 / float(os.environ.get("EDP_TEST_PHASE", "1")))
            os.environ["EDP_TEST_PHASE"] = str(step.number)
    finally:
        os.environ.pop("EDP_TEST_PHASE", None)


@said("counted")
def closure_that_counts(ctx):
    model, optimizer = made()
    counted = counter()
    for _ in ctx.steps(model, optimizer, cross_entropy):
        set_lr(optimizer, 0.01 / counted())


@said("calls")
def default_that_counts(ctx):
    model, optimizer = made()
    calls = functools.partial(lambda seen: seen.append(0) or len(seen), [])
    for _ in ctx.steps(model, optimizer, cross_entropy):
        set_lr(optimizer, 0.01 / calls())


@dataclasses.dataclass(slots=True)
class Count:
    n: int = 0


@said("nested.inner, state.n (0, then 1)")
def state_in_slots_and_in_objects_of_objects(ctx):
    model, optimizer = made()
    nested, state = types.SimpleNamespace(inner=types.SimpleNamespace(n=0)), Count()
    for _ in ctx.steps(model, optimizer, cross_entropy):
        state.n += 1
        nested.inner.n += 1
        set_lr(optimizer, 0.01 / (state.n + nested.inner.n))


Phase = enum.Enum("Phase", "WARMUP MAIN")


@said("changes phase.")
def phase(ctx):
    model, optimizer = made()
    phase = Phase.WARMUP
    for step in ctx.steps(model, optimizer, cross_entropy):
        set_lr(optimizer, 0.001 if phase is Phase.WARMUP else 0.01)
        phase = Phase.MAIN if step.number == 3 else phase


@said("model.3.p (0.2, then 0.5)")
def dropout_that_grows_later(ctx):
    model, optimizer = made()
    for step in ctx.steps(model, optimizer, cross_entropy):
        if step.number == 5:
            model[3].p = 0.5


@said("model.0._forward_hooks (0, then 1)")
def hook_that_is_added_later(ctx):
    model, optimizer = made()
    for step in ctx.steps(model, optimizer, cross_entropy):
        if step.number == 5:
            model[0].register_forward_hook(lambda module, args, out: out * 0.5)


@said("a StepLR that leaves 1e-08 of the learning rate after 8 of 18 steps")
def schedule_that_counts_epochs(ctx):
    model, optimizer = made()
    scheduler = StepLR(optimizer, step_size=1, gamma=0.1)
    for _ in ctx.steps(model, optimizer, cross_entropy, scheduler=scheduler):
        pass


@said("criterion")
def class_weights_that_change(ctx):
    model, optimizer = made()
    criterion = nn.CrossEntropyLoss(weight=torch.ones(4))

    def loss_fn(m, batch):
        return criterion(m(batch["x"]), batch["y"])

    for step in ctx.steps(model, optimizer, loss_fn):
        if step.number == 4:
            criterion.weight = torch.tensor([1.0, 2.0, 3.0, 4.0])


# ---------------------------------------------------------------------------------------- refused


@refused(LossError, "optimizer.step()")
def accumulates_gradients(ctx):
    model, optimizer = made()

    def loss_fn(m, batch):
        loss = cross_entropy(m, batch)
        (loss / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    for _ in ctx.steps(model, optimizer, loss_fn):
        pass


@refused(LossError, "of a second optimizer")
def two_optimizers(ctx):
    model = nn.ModuleDict({"g": nn.Linear(16, 16), "d": nn.Linear(16, 1)})
    optimizer_g = adamw(model["g"])
    optimizer_d = adamw(model["d"])

    def loss_fn(m, batch):
        fake = m["g"](batch["x"])
        optimizer_d.zero_grad()
        (m["d"](fake.detach()) - m["d"](batch["x"])).mean().backward()
        optimizer_d.step()
        return -m["d"](fake).mean()

    for _ in ctx.steps(model, optimizer_g, loss_fn):
        pass


@refused(LoopError, "clip_norm=1.0")
def clips_in_every_fourth_body(ctx):
    model, optimizer = made()
    for step in ctx.steps(model, optimizer, cross_entropy):
        if step.number % 4 == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)


@refused(LossError, "clips gradients and finds none")
def clips_in_the_loss(ctx):
    model, optimizer = made()
    clip = nn.utils.clip_grad_norm_

    def loss_fn(m, batch):
        loss = cross_entropy(m, batch)
        clip(m.parameters(), 1.0)
        return loss

    for _ in ctx.steps(model, optimizer, loss_fn):
        pass


@refused(LoopError, "wrote to the optimizer's state")
def optimizer_that_goes_back(ctx):
    model, optimizer = made()
    first = copy.deepcopy(optimizer.state_dict())
    for step in ctx.steps(model, optimizer, cross_entropy):
        if step.number == 5:
            optimizer.load_state_dict(first)


@refused(LoopError, "wrote to the optimizer's state")
def optimizer_that_forgets(ctx):
    model, optimizer = made()
    for step in ctx.steps(model, optimizer, cross_entropy):
        if step.number == 5:
            optimizer.state.clear()


@refused(LoopError, "scheduler= changes calls (")
def schedule_that_counts(ctx):
    model, optimizer = made()
    calls = 0

    def rate(_):
        nonlocal calls
        calls += 1
        return 1 / calls

    scheduler = LambdaLR(optimizer, rate)
    for _ in ctx.steps(model, optimizer, cross_entropy, scheduler=scheduler):
        pass


@refused(LoopError, "called twice")
def loop_of_epochs(ctx):
    model, optimizer = made()
    for _ in range(3):
        for _ in ctx.steps(model, optimizer, cross_entropy):
            pass


@refused(LoopError, "ctx.stop(reason)")
def breaks(ctx):
    model, optimizer = made()
    for step in ctx.steps(model, optimizer, cross_entropy):
        if step.number == 3:
            break


@refused(LossError, "queue")
def contrastive_queue(ctx):
    model, optimizer = made()
    queue = [torch.zeros(4)]

    def loss_fn(m, batch):
        out = m(batch["x"])
        loss = cross_entropy(m, batch) + (out @ torch.stack(queue[-8:]).T).logsumexp(1).mean()
        queue.append(out.detach().mean(0))
        return loss

    for _ in ctx.steps(model, optimizer, loss_fn):
        pass


@refused(LossError, "baseline")
def policy_gradient_with_a_baseline(ctx):
    model, optimizer = made()
    baseline = 0.0

    def loss_fn(m, batch):
        nonlocal baseline
        policy = torch.distributions.Categorical(logits=m(batch["x"]))
        action = policy.sample()
        reward = (action == batch["y"]).float()
        baseline = 0.9 * baseline + 0.1 * float(reward.mean()) + 0.01
        return -(policy.log_prob(action) * (reward - baseline)).mean()

    for _ in ctx.steps(model, optimizer, loss_fn):
        pass
