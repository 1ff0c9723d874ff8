"""Things that training code does, one train function each, for test_habits.py and the table in
docs/habits.md."""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from elastic_dp.errors import DataError, LoopError, LossError, ModelError
from tests.runs import Points
from tests.train.jobs import adamw, classifier, cross_entropy, hold

Train = Callable[[Any], None]


@dataclass(frozen=True)
class Habit:
    """`words`: of the error where it is refused, of the warning where it is said."""

    what: str
    outcome: str  # exact, refused, said
    train: Train
    error: type[Exception] | None = None
    words: str = ""
    note: str = ""
    rows: Any = None  # the data set, where it is another


HABITS = {}


def exact(what, note=""):
    return _listed(what, "exact", note=note)


def refused(what, error, words, rows=None):
    return _listed(what, "refused", error=error, words=words, rows=rows)


def said(what, words):
    return _listed(what, "said", words=words)


def _listed(what, outcome, **more):
    """For a train function, the loss function of one, or one that gives what `run` takes, by a
    model and its optimizer."""

    def add(function):
        def train(ctx):
            match function.__code__.co_varnames[: function.__code__.co_argcount]:
                case ("ctx",):
                    function(ctx)
                case ("m", "b"):
                    run(ctx, function)
                case ("model", "optimizer"):
                    model = classifier()
                    optimizer = adamw(model)
                    options = function(model, optimizer) or {}
                    run(ctx, model=model, optimizer=optimizer, **options)

        assert function.__name__ not in HABITS
        HABITS[function.__name__] = Habit(what, outcome, train, **more)
        return function

    return add


def run(ctx, loss_fn=cross_entropy, model=None, optimizer=None, body=lambda step: None, **options):
    model = classifier() if model is None else model
    optimizer = adamw(model) if optimizer is None else optimizer
    for step in ctx.steps(model, optimizer, loss_fn, **options):
        body(step)
        hold(ctx, step)


# ------------------------------------------------------------------------------------ gradients


@exact("`optimizer.zero_grad()` in the loss", "no other micro-batch's gradient is within its reach")
def zero_grad(model, optimizer):
    def loss_fn(m, b):
        optimizer.zero_grad()
        return cross_entropy(m, b)

    return {"loss_fn": loss_fn}


@exact("`optimizer.zero_grad()` in the loop's body")
def zero_grad_in_the_body(model, optimizer):
    return {"body": lambda step: optimizer.zero_grad()}


@refused(
    "`clip_grad_norm_` or `clip_grad_value_` in the body, `p.grad` read there",
    LoopError,
    "clip_norm=1.0) or clip_value=; to log their norm, step.grad_norm",
)
def clips_in_the_body(model, optimizer):
    return {"body": lambda step: nn.utils.clip_grad_value_(model.parameters(), 0.1)}


@refused(
    "`step.loss.backward()` in the body", LoopError, "calls .backward() of a number: step.loss"
)
def backward_in_the_body(ctx):
    run(ctx, body=lambda step: step.loss.backward())


@refused("`optimizer.step()` in the body", LoopError, "the body of the loop over ctx.steps called")
def steps_in_the_body(model, optimizer):
    return {"body": lambda step: optimizer.step()}


@refused("`GradScaler` in the body", LoopError, 'Write ctx.steps(…, precision="fp16")')
def scaler_in_the_body(ctx):
    model, scaler = classifier(), torch.amp.GradScaler("cpu")
    for _ in ctx.steps(model, adamw(model), cross_entropy):
        scaler.update()


@refused("`loss.backward()` in the loss", LossError, "called backward(), or assigned it")
def backward_in_the_loss(m, b):
    loss = cross_entropy(m, b)
    loss.backward(retain_graph=True)
    return loss


@exact("`backward()` of something else in the loss, then `zero_grad()`")
def backward_and_zero_grad(m, b):
    x = b["x"].clone().requires_grad_()
    m(x).square().mean().backward()
    m.zero_grad()
    return F.cross_entropy(m(b["x"] + 0.1 * x.grad.sign()), b["y"])


@refused("`p.grad` assigned in the loss", LossError, "left a gradient in model.0.weight.grad")
def assigns_gradients(m, b):
    m[0].weight.grad = torch.ones_like(m[0].weight)
    return cross_entropy(m, b)


@exact("a gradient penalty by `torch.autograd.grad`, with `retain_grad()`")
def gradient_penalty(m, b):
    x = b["x"].clone().requires_grad_()
    out = m(x)
    out.retain_grad()
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return F.cross_entropy(out, b["y"]) + 0.1 * slope.square().mean()


@refused("`optimizer.step()` in the loss", LossError, "the loss function called optimizer.step()")
def step_in_the_loss(model, optimizer):
    def loss_fn(m, b):
        optimizer.step()
        return cross_entropy(m, b)

    return {"loss_fn": loss_fn}


@refused(
    "`scheduler.step()` in the loss",
    LossError,
    "the loss function changed optimizer.param_groups[0]['lr']",
)
def scheduler_in_the_loss(model, optimizer):
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    def loss_fn(m, b):
        optimizer._opt_called = True  # torch warns of another order
        scheduler.step()
        return cross_entropy(m, b)

    return {"loss_fn": loss_fn, "scheduler": scheduler}


# ---------------------------------------------------------------------------------------- hooks


@refused(
    "`p.register_post_accumulate_grad_hook`",
    ModelError,
    "model.0.weight has a post-accumulate-grad hook",
)
def post_accumulate_grad_hook(model, optimizer):
    model[0].weight.register_post_accumulate_grad_hook(lambda p: p.grad.clamp_(-1e-3, 1e-3))


@exact(
    "`p.register_hook` that changes the gradient",
    "it sees each micro-batch's, times its share of the batch",
)
def tensor_hook(model, optimizer):
    for p in model.parameters():
        p.register_hook(lambda g: g.clamp(-1e-3, 1e-3))


@exact("a module's forward, forward-pre and full backward hooks")
def module_hooks(model, optimizer):
    model[0].register_forward_pre_hook(lambda m, x: (x[0] * 1.5,))
    model[2].register_forward_hook(lambda m, x, y: y + 0.1)
    model[4].register_full_backward_hook(lambda m, i, o: (i[0].clamp(-1e-3, 1e-3),))


@refused(
    "a hook on a parameter's AccumulateGrad node that writes `p.grad`",
    ModelError,
    "a hook on the AccumulateGrad node of model.0.weight writes to its gradient",
)
def accumulate_grad_node(model, optimizer):
    weight = model[0].weight
    node = weight.view_as(weight).grad_fn.next_functions[0][0]

    def hook(*_):
        if weight.grad is not None:
            weight.grad.mul_(0.5)

    node.register_hook(hook)
    model.node = [node]


@exact(
    "`optimizer.register_step_pre_hook` that changes gradients", "it sees those of the whole step"
)
def step_pre_hook(model, optimizer):
    def clamp(*_):
        for p in model.parameters():
            p.grad.clamp_(-1e-3, 1e-3)

    optimizer.register_step_pre_hook(clamp)


@exact("`requires_grad_` turned off and on again in the loss")
def toggles_requires_grad(m, b):
    m[0].requires_grad_(False)
    aside = m(b["x"]).square().mean()
    m[0].requires_grad_(True)
    return cross_entropy(m, b) + 0.1 * aside


@refused(
    "`requires_grad_` turned on in the loss of a later step",
    LossError,
    "did not require a gradient when the step began",
)
def turns_on_requires_grad(ctx):
    model = classifier()
    model[0].requires_grad_(False)

    def loss_fn(m, b):
        m[0].requires_grad_(ctx._session.position.step >= 2)
        return cross_entropy(m, b)

    run(ctx, loss_fn, model)


# ------------------------------------------------------------------------------- random numbers


@exact("Python's, NumPy's and torch's global random numbers, in the loss and in the body")
def global_generators(ctx):
    def loss_fn(m, b):
        noise = random.random() + np.random.rand() + torch.rand(())
        return cross_entropy(m, b) * (0.5 + noise)

    run(ctx, loss_fn, body=lambda step: ctx.log({"noise": random.random() + float(torch.rand(()))}))


@exact("`torch.manual_seed(0)` in the loss")
def manual_seed(m, b):
    torch.manual_seed(0)
    return cross_entropy(m, b)


@refused("an own NumPy generator in the loss", LossError, "What changed meanwhile: rng.")
def numpy_generator(ctx):
    rng = np.random.default_rng(0)
    run(ctx, lambda m, b: cross_entropy(m, b) * (0.5 + rng.random()))


class Around(nn.Module):
    """A classifier within, and attributes that its forward uses."""

    def __init__(self, **attributes):
        super().__init__()
        self.inner = classifier()
        for name, value in attributes.items():
            setattr(self, name, value)


class Noisy(Around):
    def forward(self, x):
        return self.inner(x + 0.1 * torch.randn(x.shape, generator=self.generator))


@refused(
    "an own `torch.Generator` in a module", LossError, "What changed meanwhile: model.generator."
)
def torch_generator(ctx):
    run(ctx, model=Noisy(generator=torch.Generator().manual_seed(0)))


class NoisyPoints(Points):
    def __init__(self):
        super().__init__()
        self.rng = np.random.default_rng(0)

    def __getitem__(self, i):
        row = super().__getitem__(i)
        return row | {"x": row["x"] + float(self.rng.random())}


@refused(
    "an own generator in the data set or its transform",
    DataError,
    "data gave other values when one micro-batch was read twice: batch['x']",
    rows=NoisyPoints(),
)
def generator_in_the_data(ctx):
    run(ctx)


# ------------------------------------------------------------------- what is kept between calls


@refused(
    "`time.time()` in the loss",
    LossError,
    "run twice from the same weights, rows and random numbers, gave the loss",
)
def clock(ctx):
    began = time.time()
    run(ctx, lambda m, b: cross_entropy(m, b) * (1 + time.time() - began))


class Counted(Around):
    """`used`: whether its count changes what it gives."""

    def forward(self, x):
        self.calls += 1
        return self.inner(x) * (1 + 0.1 * self.calls if self.used else 1)


@refused(
    "a counter in a module that changes the result",
    LossError,
    "What changed meanwhile: model.calls (0, then 1).",
)
def counter(ctx):
    run(ctx, model=Counted(calls=0, used=True))


@said(
    "a counter in a module that changes nothing, or nothing yet",
    "model.calls (1, then 2) changes with each micro-batch",
)
def idle_counter(ctx):
    run(ctx, model=Counted(calls=0, used=False))


@refused(
    "the last call's activations kept for the next",
    LossError,
    "What changed meanwhile: model.hidden.",
)
def hidden_state(ctx):
    class Recurrent(Around):
        def forward(self, x):
            out = self.inner(x) + 0.5 * self.hidden
            self.hidden = out.mean(0).detach()
            return out

    run(ctx, model=Recurrent(hidden=torch.zeros(4)))


class Centered(Around):
    def __init__(self):
        super().__init__()
        self.register_buffer("center", torch.zeros(4))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.steps += 1
        out = self.inner(x) - self.center / self.steps
        self.center = self.center.lerp(out.detach().mean(0), 0.1)
        return out


@exact(
    "buffers written in place or assigned in forward",
    "one of floats is averaged over the step's micro-batches; a count goes up once a step",
)
def buffers(ctx):
    run(ctx, model=Centered())


class Codebook(Around):
    """Written by way of `.data`, as averages of codes often are: no version is raised."""

    def __init__(self):
        super().__init__()
        self.register_buffer("unset", torch.full((3,), float("nan")))
        self.register_buffer("average", torch.zeros(4))
        self.register_buffer("codes", torch.zeros(4, 1 << 15))

    def forward(self, x):
        out = self.inner(x) + self.average + self.codes[:, 0]
        self.average.data = self.average.lerp(out.detach().mean(0), 0.1)
        self.codes.data.lerp_(out.detach().mean(0)[:, None].expand_as(self.codes), 0.1)
        return out


@exact("buffers written by way of `.data`, or that hold NaN")
def buffers_by_data(ctx):
    run(ctx, model=Codebook())


@refused(
    "an integer buffer that depends on the rows",
    ModelError,
    "buffer 'last' (torch.int64) differs between virtual workers",
)
def integer_buffer(model, optimizer):
    model.register_buffer("last", torch.zeros((), dtype=torch.long))

    def loss_fn(m, b):
        m.last.copy_(b["i"][0])
        return cross_entropy(m, b)

    return {"loss_fn": loss_fn}


@refused("a buffer that forward registers", LoopError, "model.mean was added to the model")
def late_buffer(ctx):
    class Late(Around):
        def forward(self, x):
            if not hasattr(self, "mean"):
                self.register_buffer("mean", x.mean())
            return self.inner(x)

    run(ctx, model=Late())


class Rotary(Around):
    """Caches what its first call computes, as position embeddings and masks are."""

    def forward(self, x):
        if self.cached is None or self.length < x.shape[1]:
            self.length = x.shape[1]
            self.cached = torch.arange(self.length, dtype=torch.float32).cos()
        return self.inner(x * self.cached)


@exact("a cache that the first call fills (rotary embeddings, masks)")
def cache(ctx):
    run(ctx, model=Rotary(cached=None, length=0))


# -------------------------------------------------------------------------- model and parameters


@refused("`model.eval()` left on by the loss", LossError, "model.training (True, then False)")
def leaves_mode(m, b):
    loss = cross_entropy(m, b)
    m.eval()
    return loss


@refused(
    "`p.data` written in the loss (clipping weights)",
    LossError,
    "the loss function changed model.0.weight",
)
def writes_in_the_loss(m, b):
    for p in m.parameters():
        p.data.clamp_(-0.1, 0.1)
    return cross_entropy(m, b)


@refused(
    "parameters written in the loss of a later step (by another optimizer, as GANs do)",
    LossError,
    "the loss function called other.step(), of a second optimizer",
)
def trains_a_critic_in_the_loss(ctx):
    model = nn.ModuleDict({"net": classifier(), "critic": nn.Linear(4, 1)})
    other = torch.optim.SGD(model["critic"].parameters(), lr=0.1)

    def loss_fn(m, b):
        out = m["net"](b["x"])
        if ctx._session.position.step >= 2:
            m["critic"](out.detach()).mean().backward()
            other.step()
            other.zero_grad()
        return F.cross_entropy(out, b["y"]) + m["critic"](out).mean()

    run(ctx, loss_fn, model, adamw(model["net"]))


@refused("a layer that the body replaces", LoopError, "model.4 was replaced by another module")
def replaces_a_layer(model, optimizer):
    def body(step):
        model[4] = nn.Linear(32, 4)

    return {"body": body}


@refused("`nn.Embedding(…, max_norm=…)`", ModelError, "model.table has max_norm=1")
def max_norm(ctx):
    model = nn.ModuleDict({"table": nn.Embedding(192, 16, max_norm=1.0), "net": classifier()})
    run(ctx, lambda m, b: F.cross_entropy(m["net"](b["x"] + m["table"](b["i"])), b["y"]), model)


@refused("`p.data` written in the body", LoopError, "the body of the loop over ctx.steps wrote to")
def writes_in_the_body(model, optimizer):
    def body(step):
        for p in model.parameters():
            p.data.mul_(0.99)

    return {"body": body}


@said("a metric that shows a clock", "metrics['seconds'] (")
def clock_in_a_metric(m, b):
    began = time.perf_counter()
    loss = cross_entropy(m, b)
    return loss, len(b["x"]), {"seconds": time.perf_counter() - began}


@said("`ctx.world_size` or `ctx.rank` read in the loss", "the loss function reads ctx.world_size")
def world_size(ctx):
    run(ctx, lambda m, b: cross_entropy(m, b) / max(1, ctx.world_size))


@refused("`ctx.log` in the loss", LossError, "the loss function called ctx.log")
def logs_in_the_loss(ctx):
    def loss_fn(m, b):
        loss = cross_entropy(m, b)
        ctx.log({"train_loss": loss})
        return loss

    run(ctx, loss_fn)


def autocast_loss(m, b):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return F.cross_entropy(m(b["x"]).float(), b["y"])


@exact("the whole loop under `torch.autocast`", "each step casts the weights again")
def autocast_around_the_loop(ctx):
    model = classifier()

    def body(step):
        with torch.no_grad():
            ctx.log({"mean": model(torch.ones(1, 16)).mean()})

    with torch.autocast("cpu", dtype=torch.bfloat16):
        run(ctx, autocast_loss, model, body=body)


@refused(
    "a loss that is a Python number", LossError, "the loss is a float, must be a real scalar tensor"
)
def python_float(ctx):
    run(ctx, lambda m, b: cross_entropy(m, b).item())


# --------------------------------------------------------------------- optimizer, body, settings


@exact("`lr` set in the body")
def lr_in_the_body(model, optimizer):
    def body(step):
        optimizer.param_groups[0]["lr"] *= 0.9

    return {"body": body}


@refused(
    "`scheduler.step()` in the body, and the scheduler not passed to `ctx.steps`",
    LoopError,
    "changed a CosineAnnealingLR that is not passed to ctx.steps",
)
def scheduler_not_passed(ctx):
    model = classifier()
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    run(ctx, model=model, optimizer=optimizer, body=lambda step: scheduler.step())


@refused(
    "`scheduler.step()` in the body, and the scheduler passed as `scheduler=`",
    LoopError,
    "called scheduler.step(), and so does the loop",
)
def scheduler_twice(model, optimizer):
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    return {"body": lambda step: scheduler.step(), "scheduler": scheduler}


@said(
    "a teacher that the body averages and the loss uses, not passed as `state=`",
    "the body of the loop over ctx.steps changes teacher",
)
def teacher_not_passed(model, optimizer):
    teacher = copy.deepcopy(model).eval().requires_grad_(False)

    def body(step):
        for mine, p in zip(teacher.parameters(), model.parameters(), strict=True):
            mine.lerp_(p.detach(), 0.1)

    def loss_fn(m, b):
        return cross_entropy(m, b) + F.mse_loss(m(b["x"]), teacher(b["x"]))

    return {"loss_fn": loss_fn, "body": body}


class Momentum(torch.optim.SGD):
    """Holds `own`, and lets it decide how far it goes."""

    def __init__(self, parameters, own, factor):
        super().__init__(parameters, lr=0.05)
        self.own, self.factor = own, factor

    def step(self, closure: Any = None) -> None:
        self.param_groups[0]["lr"] = 0.05 * self.factor(self.own)
        super().step()


def _counts(own):
    own["calls"] += 1
    return 1 / own["calls"]


@exact("an optimizer that keeps numbers and tensors of its own")
def own_numbers(ctx):
    model = classifier()
    run(ctx, model=model, optimizer=Momentum(model.parameters(), {"calls": 0}, _counts))


@said(
    "a counter, a best value, a list that the body keeps in a variable", "changes wait (0, then 1)"
)
def counter_in_the_body(ctx):
    model, wait = classifier(), 0
    for step in ctx.steps(model, adamw(model), cross_entropy):
        wait = wait + 1
        hold(ctx, step)


@exact("the same, in `c = ctx.carry(wait=0)`")
def carried_counter(ctx):
    model = classifier()
    optimizer = adamw(model)
    c = ctx.carry(wait=0)
    for step in ctx.steps(model, optimizer, cross_entropy):
        c.wait += 1
        optimizer.param_groups[0]["lr"] = 0.01 / c.wait
        hold(ctx, step)


@refused(
    "a buffer that is a view of another one, or expanded",
    ModelError,
    "model.whole and model.part share memory",
)
def aliasing_buffers(model, optimizer):
    memory = torch.arange(16.0)
    model.register_buffer("whole", memory)
    model.register_buffer("part", memory[:8])
    return {"loss_fn": lambda m, b: F.cross_entropy(m(b["x"] * m.whole.cos()), b["y"])}


@exact("experts with BatchNorm of their own, of which a micro-batch uses some")
def experts(ctx):
    one = lambda: nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))  # noqa: E731
    model = nn.ModuleList([one(), one()])

    def loss_fn(m, b):
        return F.cross_entropy(m[int(b["i"].sum()) % 2](b["x"]), b["y"])

    run(ctx, loss_fn, model)


@said(
    "a module's attribute set in the body",
    "the body of the loop over ctx.steps changes model.warmth",
)
def attribute_in_the_body(model, optimizer):
    model.warmth = 1.0

    def body(step):
        model.warmth = 0.9**step.number

    return {"loss_fn": lambda m, b: cross_entropy(m, b) * m.warmth, "body": body}


@said(
    "`torch.use_deterministic_algorithms(False)`; on a GPU `torch.backends.cudnn.benchmark = True`",
    "not exact: torch.use_deterministic_algorithms was turned off",
)
def determinism_off(ctx):
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark = True  # of no effect on the CPU
    run(ctx)
