"""Training loops as people write them: what each comes to when workers that began it are lost.

`exact`: the bits of the run that nothing disturbs. `said`: a warning names the variable, in the
first bodies. `refused`: one typed error, before a weight is wrong.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import (
    LambdaLR,
    ReduceLROnPlateau,
)
from torch.optim.swa_utils import AveragedModel
from tqdm import tqdm

from elastic_dp.errors import LoopError
from tests.train.jobs import adamw, classifier, cross_entropy

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
def early_stopping_that_travels(ctx):
    model, optimizer = made()
    c = ctx.carry(best=math.inf, wait=0)
    for step in ctx.steps(model, optimizer, cross_entropy):
        c.wait = 0 if step.loss < c.best else c.wait + 1
        c.best = min(c.best, step.loss)
        if c.wait == 6:
            ctx.stop("no better")


@exact
def plateau(ctx):
    model, optimizer = made()
    scheduler = ReduceLROnPlateau(optimizer, patience=1, threshold=0.5)
    for step in ctx.steps(model, optimizer, cross_entropy, state={"plateau": scheduler}):
        scheduler.step(step.loss)


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
def layers_that_freeze(ctx):
    model, optimizer = made()
    for step in ctx.steps(model, optimizer, cross_entropy):
        if step.number == 3:
            model[0].requires_grad_(False)
        if step.number == 11:
            model[0].requires_grad_(True)


@exact
def progress_bar(ctx):
    model, optimizer = made()
    bar = tqdm(ctx.steps(model, optimizer, cross_entropy), disable=True)
    for step in bar:
        bar.set_postfix(loss=step.loss)


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


@said("ema")
def average_by_hand(ctx):
    model, optimizer = made()
    ema = copy.deepcopy(model)
    for _ in ctx.steps(model, optimizer, cross_entropy):
        with torch.no_grad():
            for mine, p in zip(ema.parameters(), model.parameters(), strict=True):
                mine.mul_(0.9).add_(p, alpha=0.1)


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


@said("lr (0.01, then")
def lr_of_a_zip(ctx):
    model, optimizer = made()
    lrs = [0.01 * 0.9**n for n in range(100)]
    for _, lr in zip(ctx.steps(model, optimizer, cross_entropy), lrs, strict=False):
        set_lr(optimizer, lr)


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


@said("changes smooth (")
def average_that_the_first_body_makes(ctx):
    model, optimizer = made()
    for step in ctx.steps(model, optimizer, cross_entropy):
        smooth = step.loss if step.number == 1 else 0.9 * smooth + 0.1 * step.loss  # noqa: F821
        set_lr(optimizer, 0.01 * min(1.0, smooth))


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


@dataclasses.dataclass(slots=True)
class Count:
    n: int = 0


@said("state.n (0, then 1)")
def state_in_slots(ctx):
    model, optimizer = made()
    state = Count()
    for _ in ctx.steps(model, optimizer, cross_entropy):
        state.n += 1
        set_lr(optimizer, 0.01 / state.n)


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


@refused(LoopError, "clip_norm=1.0")
def clips_in_every_fourth_body(ctx):
    model, optimizer = made()
    for step in ctx.steps(model, optimizer, cross_entropy):
        if step.number % 4 == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)


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
