"""Things that training code does, one train function each, for test_habits.py and the table in
docs/habits.md."""

from __future__ import annotations

import copy
import functools
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


def exact(note=""):
    return _listed("exact", note=note)


def refused(error, words, rows=None):
    return _listed("refused", error=error, words=words, rows=rows)


def said(words):
    return _listed("said", words=words)


def _listed(outcome, **more):
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
        what = " ".join(function.__doc__.split())
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


@exact()
def zero_grad(model, optimizer):
    """`optimizer.zero_grad()` in the loss"""

    def loss_fn(m, b):
        optimizer.zero_grad()
        return cross_entropy(m, b)

    return {"loss_fn": loss_fn}


@exact()
def zero_grad_in_the_body(model, optimizer):
    """`optimizer.zero_grad()` in the loop's body"""
    return {"body": lambda step: optimizer.zero_grad()}


@refused(LoopError, "clip_norm=1.0) or clip_value=; to log their norm, step.grad_norm")
def clips_in_the_body(model, optimizer):
    """`clip_grad_norm_` or `clip_grad_value_` in the body, `p.grad` read there"""
    return {"body": lambda step: nn.utils.clip_grad_value_(model.parameters(), 0.1)}


@refused(LoopError, "calls .backward() of a number: step.loss")
def backward_in_the_body(ctx):
    """`step.loss.backward()` in the body"""
    run(ctx, body=lambda step: step.loss.backward())


@refused(LoopError, "the body of the loop over ctx.steps called")
def steps_in_the_body(model, optimizer):
    """`optimizer.step()` in the body"""
    return {"body": lambda step: optimizer.step()}


@refused(LoopError, 'Write ctx.steps(…, precision="fp16")')
def scaler_in_the_body(ctx):
    """`GradScaler` in the body"""
    model, scaler = classifier(), torch.amp.GradScaler("cpu")
    for _ in ctx.steps(model, adamw(model), cross_entropy):
        scaler.update()


@refused(LossError, "called backward(), or assigned it")
def backward_in_the_loss(m, b):
    """`loss.backward()` in the loss"""
    loss = cross_entropy(m, b)
    loss.backward(retain_graph=True)
    return loss


@exact()
def backward_and_zero_grad(m, b):
    """`backward()` of something else in the loss, then `zero_grad()`"""
    x = b["x"].clone().requires_grad_()
    m(x).square().mean().backward()
    m.zero_grad()
    return F.cross_entropy(m(b["x"] + 0.1 * x.grad.sign()), b["y"])


@refused(LossError, "left a gradient in model.0.weight.grad")
def assigns_gradients(m, b):
    """`p.grad` assigned in the loss"""
    m[0].weight.grad = torch.ones_like(m[0].weight)
    return cross_entropy(m, b)


@exact()
def gradient_penalty(m, b):
    """a gradient penalty by `torch.autograd.grad`, with `retain_grad()`"""
    x = b["x"].clone().requires_grad_()
    out = m(x)
    out.retain_grad()
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return F.cross_entropy(out, b["y"]) + 0.1 * slope.square().mean()


@refused(LossError, "the loss function called optimizer.step()")
def step_in_the_loss(model, optimizer):
    """`optimizer.step()` in the loss"""

    def loss_fn(m, b):
        optimizer.step()
        return cross_entropy(m, b)

    return {"loss_fn": loss_fn}


@refused(LossError, "the loss function changed optimizer.param_groups[0]['lr']")
def scheduler_in_the_loss(model, optimizer):
    """`scheduler.step()` in the loss"""
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    def loss_fn(m, b):
        optimizer._opt_called = True  # torch warns of another order
        scheduler.step()
        return cross_entropy(m, b)

    return {"loss_fn": loss_fn, "scheduler": scheduler}


# ---------------------------------------------------------------------------------------- hooks


@refused(ModelError, "model.0.weight has a post-accumulate-grad hook")
def post_accumulate_grad_hook(model, optimizer):
    """`p.register_post_accumulate_grad_hook`"""
    model[0].weight.register_post_accumulate_grad_hook(lambda p: p.grad.clamp_(-1e-3, 1e-3))


@exact("it sees each micro-batch's, times its share of the batch")
def tensor_hook(model, optimizer):
    """`p.register_hook` that changes the gradient"""
    for p in model.parameters():
        p.register_hook(lambda g: g.clamp(-1e-3, 1e-3))


@exact()
def module_hooks(model, optimizer):
    """a module's forward, forward-pre and full backward hooks"""
    model[0].register_forward_pre_hook(lambda m, x: (x[0] * 1.5,))
    model[2].register_forward_hook(lambda m, x, y: y + 0.1)
    model[4].register_full_backward_hook(lambda m, i, o: (i[0].clamp(-1e-3, 1e-3),))


@refused(ModelError, "a hook on the AccumulateGrad node of model.0.weight writes to its gradient")
def accumulate_grad_node(model, optimizer):
    """a hook on a parameter's AccumulateGrad node that writes `p.grad`"""
    weight = model[0].weight
    node = weight.view_as(weight).grad_fn.next_functions[0][0]

    def hook(*_):
        if weight.grad is not None:
            weight.grad.mul_(0.5)

    node.register_hook(hook)
    model.node = [node]


@exact("it sees those of the whole step")
def step_pre_hook(model, optimizer):
    """`optimizer.register_step_pre_hook` that changes gradients"""

    def clamp(*_):
        for p in model.parameters():
            p.grad.clamp_(-1e-3, 1e-3)

    optimizer.register_step_pre_hook(clamp)


@exact()
def toggles_requires_grad(m, b):
    """`requires_grad_` turned off and on again in the loss"""
    m[0].requires_grad_(False)
    aside = m(b["x"]).square().mean()
    m[0].requires_grad_(True)
    return cross_entropy(m, b) + 0.1 * aside


@refused(LossError, "did not require a gradient when the step began")
def turns_on_requires_grad(ctx):
    """`requires_grad_` turned on in the loss of a later step"""
    model = classifier()
    model[0].requires_grad_(False)

    def loss_fn(m, b):
        m[0].requires_grad_(ctx._session.position.step >= 2)
        return cross_entropy(m, b)

    run(ctx, loss_fn, model)


# ------------------------------------------------------------------------------- random numbers


@exact()
def global_generators(ctx):
    """Python's, NumPy's and torch's global random numbers, in the loss and in the body"""

    def loss_fn(m, b):
        noise = random.random() + np.random.rand() + torch.rand(())
        return cross_entropy(m, b) * (0.5 + noise)

    run(ctx, loss_fn, body=lambda step: ctx.log({"noise": random.random() + float(torch.rand(()))}))


@exact()
def manual_seed(m, b):
    """`torch.manual_seed(0)` in the loss"""
    torch.manual_seed(0)
    return cross_entropy(m, b)


@refused(LossError, "What changed meanwhile: rng.")
def numpy_generator(ctx):
    """an own NumPy generator in the loss"""
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


@refused(LossError, "What changed meanwhile: model.generator.")
def torch_generator(ctx):
    """an own `torch.Generator` in a module"""
    run(ctx, model=Noisy(generator=torch.Generator().manual_seed(0)))


class LateNoise(nn.Module):
    """Draws after three steps."""

    def __init__(self):
        super().__init__()
        self.inner, self.generator = classifier(), torch.Generator()
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, x):
        if self.training:
            self.seen += 1
        late = self.seen > 3
        return self.inner(x + torch.rand(x.shape, generator=self.generator) if late else x)


@refused(ModelError, "forward drew from model.generator")
def torch_generator_later(ctx):
    """the same, drawn from only after a warm-up"""
    run(ctx, model=LateNoise())


@said("rng changes with each micro-batch")
def numpy_generator_later(ctx):
    """an own generator in the loss, drawn from only after a warm-up"""
    rng = np.random.default_rng(0)
    c = ctx.carry(warm=False)

    def loss_fn(m, b):
        return cross_entropy(m, b) * (rng.random() if c.warm else 1.0)

    run(ctx, loss_fn, body=lambda step: setattr(c, "warm", step.number > 3))


class NoisyPoints(Points):
    def __init__(self):
        super().__init__()
        self.rng = np.random.default_rng(0)

    def __getitem__(self, i):
        row = super().__getitem__(i)
        return row | {"x": row["x"] + float(self.rng.random())}


@refused(
    DataError,
    "data gave other values when one micro-batch was read twice: batch['x']",
    rows=NoisyPoints(),
)
def generator_in_the_data(ctx):
    """an own generator in the data set or its transform"""
    run(ctx)


# ------------------------------------------------------------------- what is kept between calls


@refused(LossError, "run twice from the same weights, rows and random numbers, gave the loss")
def clock(ctx):
    """`time.time()` in the loss"""
    began = time.time()
    run(ctx, lambda m, b: cross_entropy(m, b) * (1 + time.time() - began))


class Counted(Around):
    """`used`: whether its count changes what it gives."""

    def forward(self, x):
        self.calls += 1
        return self.inner(x) * (1 + 0.1 * self.calls if self.used else 1)


@refused(LossError, "What changed meanwhile: model.calls (0, then 1).")
def counter(ctx):
    """a counter in a module that changes the result"""
    run(ctx, model=Counted(calls=0, used=True))


@said("model.calls (1, then 2) changes with each micro-batch")
def idle_counter(ctx):
    """a counter in a module that changes nothing, or nothing yet"""
    run(ctx, model=Counted(calls=0, used=False))


@refused(LossError, "What changed meanwhile: model.hidden.")
def hidden_state(ctx):
    """the last call's activations kept for the next"""

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


@exact("one of floats is averaged over the step's micro-batches; a count goes up once a step")
def buffers(ctx):
    """buffers written in place or assigned in forward"""
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


@exact()
def buffers_by_data(ctx):
    """buffers written by way of `.data`, or that hold NaN"""
    run(ctx, model=Codebook())


@refused(ModelError, "buffer 'last' (torch.int64) differs between virtual workers")
def integer_buffer(model, optimizer):
    """an integer buffer that depends on the rows"""
    model.register_buffer("last", torch.zeros((), dtype=torch.long))

    def loss_fn(m, b):
        m.last.copy_(b["i"][0])
        return cross_entropy(m, b)

    return {"loss_fn": loss_fn}


@refused(LoopError, "model.mean was added to the model")
def late_buffer(ctx):
    """a buffer that forward registers"""

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


@exact()
def cache(ctx):
    """a cache that the first call fills (rotary embeddings, masks)"""
    run(ctx, model=Rotary(cached=None, length=0))


# -------------------------------------------------------------------------- model and parameters


@refused(LossError, "model.training (True, then False)")
def leaves_mode(m, b):
    """`model.eval()` left on by the loss"""
    loss = cross_entropy(m, b)
    m.eval()
    return loss


@refused(LossError, "the loss function changed model.0.weight")
def writes_in_the_loss(m, b):
    """`p.data` written in the loss (clipping weights)"""
    for p in m.parameters():
        p.data.clamp_(-0.1, 0.1)
    return cross_entropy(m, b)


@refused(LossError, "the loss function called other.step(), of a second optimizer")
def trains_a_critic_in_the_loss(ctx):
    """parameters written in the loss of a later step (by another optimizer, as GANs do)"""
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


@refused(LoopError, "model.4 was replaced by another module")
def replaces_a_layer(model, optimizer):
    """a layer that the body replaces"""

    def body(step):
        model[4] = nn.Linear(32, 4)

    return {"body": body}


@refused(ModelError, "model.table has max_norm=1")
def max_norm(ctx):
    """`nn.Embedding(…, max_norm=…)`"""
    model = nn.ModuleDict({"table": nn.Embedding(192, 16, max_norm=1.0), "net": classifier()})
    run(ctx, lambda m, b: F.cross_entropy(m["net"](b["x"] + m["table"](b["i"])), b["y"]), model)


@refused(LoopError, "the body of the loop over ctx.steps wrote to")
def writes_in_the_body(model, optimizer):
    """`p.data` written in the body"""

    def body(step):
        for p in model.parameters():
            p.data.mul_(0.99)

    return {"body": body}


@said("metrics['seconds'] (")
def clock_in_a_metric(m, b):
    """a metric that shows a clock"""
    began = time.perf_counter()
    loss = cross_entropy(m, b)
    return loss, len(b["x"]), {"seconds": time.perf_counter() - began}


@said("the loss function reads ctx.world_size")
def world_size(ctx):
    """`ctx.world_size` or `ctx.rank` read in the loss"""
    run(ctx, lambda m, b: cross_entropy(m, b) / max(1, ctx.world_size))


@refused(LossError, "the loss function called ctx.log")
def logs_in_the_loss(ctx):
    """`ctx.log` in the loss"""

    def loss_fn(m, b):
        loss = cross_entropy(m, b)
        ctx.log({"train_loss": loss})
        return loss

    run(ctx, loss_fn)


def autocast_loss(m, b):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return F.cross_entropy(m(b["x"]).float(), b["y"])


@exact("each step casts the weights again")
def autocast_around_the_loop(ctx):
    """the whole loop under `torch.autocast`"""
    model = classifier()

    def body(step):
        with torch.no_grad():
            ctx.log({"mean": model(torch.ones(1, 16)).mean()})

    with torch.autocast("cpu", dtype=torch.bfloat16):
        run(ctx, autocast_loss, model, body=body)


@refused(LossError, "the loss is a float, must be a real scalar tensor")
def python_float(ctx):
    """a loss that is a Python number"""
    run(ctx, lambda m, b: cross_entropy(m, b).item())


# --------------------------------------------------------------------- optimizer, body, settings


@exact()
def lr_in_the_body(model, optimizer):
    """`lr` set in the body"""

    def body(step):
        optimizer.param_groups[0]["lr"] *= 0.9

    return {"body": body}


@refused(LoopError, "changed a CosineAnnealingLR that is not passed to ctx.steps")
def scheduler_not_passed(ctx):
    """`scheduler.step()` in the body, and the scheduler not passed to `ctx.steps`"""
    model = classifier()
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    run(ctx, model=model, optimizer=optimizer, body=lambda step: scheduler.step())


@refused(LoopError, "called scheduler.step(), and so does the loop")
def scheduler_twice(model, optimizer):
    """`scheduler.step()` in the body, and the scheduler passed as `scheduler=`"""
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    return {"body": lambda step: scheduler.step(), "scheduler": scheduler}


@refused(ModelError, "scheduler.lr_lambdas[0], or a variable that it uses")
def rate_that_counts(model, optimizer):
    """a function of `LambdaLR` that counts its calls in a variable"""
    calls = 0

    def rate(_):
        nonlocal calls
        calls += 1
        return 1 / calls

    return {"scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, rate)}


class Rate:
    calls = 0

    def of_step(self, _):
        self.calls += 1
        return 1 / self.calls


@refused(ModelError, "scheduler.lr_lambdas[0], or a variable that it uses")
def method_that_counts(model, optimizer):
    """the same of a method"""
    return {"scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, Rate().of_step)}


NORMS = [1.0]


@refused(ModelError, "the global NORMS, which optimizer.step_hooks.0 uses, has changed")
def hook_that_writes_a_global(model, optimizer):
    """a step hook, or an optimizer's `step()`, that writes a global"""

    def smooth(*_):
        NORMS.append(0.9 * NORMS[-1])
        for p in model.parameters():
            p.grad.mul_(NORMS[-1])

    optimizer.register_step_pre_hook(smooth)


@said("the body of the loop over ctx.steps changes teacher")
def teacher_not_passed(model, optimizer):
    """a teacher that the body averages and the loss uses, not passed as `state=`"""
    teacher = copy.deepcopy(model).eval().requires_grad_(False)

    def body(step):
        for mine, p in zip(teacher.parameters(), model.parameters(), strict=True):
            mine.lerp_(p.detach(), 0.1)

    def loss_fn(m, b):
        return cross_entropy(m, b) + F.mse_loss(m(b["x"]), teacher(b["x"]))

    return {"loss_fn": loss_fn, "body": body}


@said("the body of the loop over ctx.steps changes teacher")
def teacher_by_data(model, optimizer):
    """the same by way of `.data`"""
    teacher = copy.deepcopy(model).eval().requires_grad_(False)

    def body(step):
        for mine, p in zip(teacher.parameters(), model.parameters(), strict=True):
            mine.data.mul_(0.9).add_(p.data, alpha=0.1)

    def loss_fn(m, b):
        return cross_entropy(m, b) + F.mse_loss(m(b["x"]), teacher(b["x"]))

    return {"loss_fn": loss_fn, "body": body}


@said("the body of the loop over ctx.steps changes deep")
def last_layer_of_a_teacher(model, optimizer):
    """the same of its last layer only"""
    deep = nn.Sequential(*(nn.Linear(16, 16) for _ in range(9)), nn.Linear(16, 4))

    def body(step):
        with torch.no_grad():
            deep[-1].bias.mul_(0.9)

    def loss_fn(m, b):
        return cross_entropy(m, b) + F.mse_loss(m(b["x"]), deep(b["x"]).detach())

    return {"loss_fn": loss_fn, "body": body}


@said("the body of the loop over ctx.steps changes shadow")
def large_container(model, optimizer):
    """a large container whose items the body replaces, not passed as `state=`"""
    shadow = {number: torch.zeros(4) for number in range(100)}

    def body(step):
        for number in shadow:
            shadow[number] = shadow[number] + 0.1

    def loss_fn(m, b):
        return cross_entropy(m, b) + sum(shadow.values()).sum()

    return {"loss_fn": loss_fn, "body": body}


class _Centered(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("center", torch.zeros(4))

    def forward(self, outputs):
        self.center = 0.9 * self.center + 0.1 * outputs.detach().mean(0)
        return outputs


@said("criterion.center changes with each micro-batch")
def buffer_of_a_criterion(ctx):
    """a buffer that the loss writes, of a module that is not the model, and that changes nothing
    yet"""
    criterion = _Centered()
    run(ctx, lambda m, b: F.cross_entropy(criterion(m(b["x"])), b["y"]))


@said("loss_fn.seen changes with each micro-batch")
def values_of_a_partial(ctx):
    """values that `functools.partial` gives the loss, written there, and that change nothing yet"""

    def loss_fn(m, b, seen):
        seen.add_(1)
        return cross_entropy(m, b)

    run(ctx, functools.partial(loss_fn, seen=torch.zeros(1)))


@said("factors changes with each micro-batch")
def generator_in_the_loss(ctx):
    """`next(…)` of a Python generator in the loss, whose values are equal at first"""
    factors = (1.0 if number < 20 else 1.5 for number in range(1_000_000))
    run(ctx, lambda m, b: cross_entropy(m, b) * next(factors))


@said("gives another optimizer to optimizer")
def another_optimizer(ctx):
    """`optimizer = …` in the body"""
    model = classifier()
    optimizer = adamw(model)
    for step in ctx.steps(model, optimizer, cross_entropy):
        if step.number == 2:
            optimizer = torch.optim.ASGD(model.parameters())
        hold(ctx, step)


@said("sets the gradients of some parameters to None, that of model.0.weight among them")
def drops_some_gradients(model, optimizer):
    """`p.grad = None` of some parameters in the body"""

    def body(step):
        model[0].weight.grad = None

    return {"body": body}


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


class OwnRate(torch.optim.SGD):
    """Chooses its rate, as Adafactor does."""

    def __init__(self, parameters):
        super().__init__(parameters)
        self.param_groups[0]["lr"] = None

    def step(self, closure: Any = None) -> None:
        group = self.param_groups[0]
        group["lr"] = 0.05
        super().step()
        group["lr"] = None


@exact()
def no_rate(ctx):
    """an optimizer whose `lr` is None"""
    model = classifier()
    run(ctx, model=model, optimizer=OwnRate(model.parameters()))


@exact()
def own_numbers(ctx):
    """an optimizer that keeps numbers and tensors of its own"""
    model = classifier()
    run(ctx, model=model, optimizer=Momentum(model.parameters(), {"calls": 0}, _counts))


@said("changes wait (0, then 1)")
def counter_in_the_body(ctx):
    """a counter, a best value, a list that the body keeps in a variable"""
    model, wait = classifier(), 0
    for step in ctx.steps(model, adamw(model), cross_entropy):
        wait = wait + 1
        hold(ctx, step)


class Meter:
    def __init__(self):
        self.mean = 0.0


@said("the body of the loop over ctx.steps changes meters")
def meters_in_a_list(ctx):
    """the same in objects of yours, in a list or in an object"""
    model, meters = classifier(), [Meter()]
    for step in ctx.steps(model, adamw(model), cross_entropy):
        meters[0].mean += 0.1 * (step.loss - meters[0].mean)
        hold(ctx, step)


@exact()
def carried_counter(ctx):
    """a counter in `c = ctx.carry(wait=0)`"""
    model = classifier()
    optimizer = adamw(model)
    c = ctx.carry(wait=0)
    for step in ctx.steps(model, optimizer, cross_entropy):
        c.wait += 1
        optimizer.param_groups[0]["lr"] = 0.01 / c.wait
        hold(ctx, step)


@refused(ModelError, "model.whole and model.part share memory")
def aliasing_buffers(model, optimizer):
    """a buffer that is a view of another one, or expanded"""
    memory = torch.arange(16.0)
    model.register_buffer("whole", memory)
    model.register_buffer("part", memory[:8])
    return {"loss_fn": lambda m, b: F.cross_entropy(m(b["x"] * m.whole.cos()), b["y"])}


@exact()
def experts(ctx):
    """experts with BatchNorm of their own, of which a micro-batch uses some"""
    one = lambda: nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))  # noqa: E731
    model = nn.ModuleList([one(), one()])

    def loss_fn(m, b):
        return F.cross_entropy(m[int(b["i"].sum()) % 2](b["x"]), b["y"])

    run(ctx, loss_fn, model)


@said("the body of the loop over ctx.steps changes model.warmth")
def attribute_in_the_body(model, optimizer):
    """a module's attribute set in the body"""
    model.warmth = 1.0

    def body(step):
        model.warmth = 0.9**step.number

    return {"loss_fn": lambda m, b: cross_entropy(m, b) * m.warmth, "body": body}


@said("the body of the loop over ctx.steps changes model.mask")
def mask_in_the_body(model, optimizer):
    """a module's tensor that is no buffer (a mask), written in the body"""
    model.mask = torch.ones(4)

    def body(step):
        if step.number == 3:
            model.mask[0] = 0.0

    return {"loss_fn": lambda m, b: F.cross_entropy(m(b["x"]) * m.mask, b["y"]), "body": body}


@said("not exact: torch.use_deterministic_algorithms was turned off")
def determinism_off(ctx):
    """`torch.use_deterministic_algorithms(False)`; on a GPU `torch.backends.cudnn.benchmark =
    True`"""
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark = True  # of no effect on the CPU
    run(ctx)
