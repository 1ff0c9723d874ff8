"""Train functions for tests: one for each thing that has broken bitwise equality somewhere."""

from __future__ import annotations

import copy
import os
import random
import time
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from elastic_dp.distributed import gradient_buckets
from elastic_dp.distributed.cross_worker_reduction import BucketReduction
from elastic_dp.train.local_run import LocalRun
from elastic_dp.train.state.train_state import TrainState
from tests.patience import eventually


def hold(ctx, step):
    """In the bodies of the steps named in ctx.config["hold"] (0: all), wait until the group has
    that size; in those named in ctx.config["gates"], until that file is there; in all, while there
    is the file ctx.config["pause"], for what is told meanwhile.

    Only bodies wait, so no result depends on it; it makes sure that things happen where a test
    wants them.
    """
    if isinstance(ctx._session.link, LocalRun):
        return
    control = ctx._session.control
    sizes, gate = ctx.config.get("hold", {}), ctx.config.get("gates", {}).get(step.number)
    size, pause = sizes.get(step.number, sizes.get(0)), ctx.config.get("pause")
    # The group changes as soon as this body lets it, or never will: who stops takes nobody in.
    # What the first process of a worker has heard of a stop counts: it is agreed at a loop head.
    changes = [control._over, lambda: control._planned, lambda: control._stop]

    def wait_for(condition):
        eventually(lambda: control.agreed(bool(condition())))  # all processes of a worker together

    if size:
        # Also those who join and have no virtual workers yet: they need further steps.
        wait_for(
            lambda: (
                len(ctx._session.membership.members) == size or any(change() for change in changes)
            )
        )
    if pause:
        wait_for(lambda: not os.path.exists(pause) or any(change() for change in changes))
    if gate:
        wait_for(lambda: os.path.exists(gate) or control.release_reason)
    time.sleep(ctx.config.get("body_s", 0.0))


def classifier(x=16):
    return nn.Sequential(
        nn.Linear(x, 32), nn.LayerNorm(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 4)
    )


def cross_entropy(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"])


def loop(ctx, model, optimizer, loss_fn=cross_entropy, body=lambda step: None, **options):
    made = objects_of(model, optimizer)
    for step in ctx.steps(model, optimizer, loss_fn, **options):
        assert objects_of(model, optimizer) == made
        body(step)
        hold(ctx, step)


def training(make):
    def train(ctx):
        model = make()
        loop(ctx, model, adamw(model))

    return train


def classify(ctx, loss_fn=cross_entropy, **options):
    model = classifier()
    loop(ctx, model, adamw(model), loss_fn, **options)


def logs_its_loss(ctx):
    classify(ctx, body=lambda step: ctx.log({"loss": step.loss}))


def digest_of(weights):
    """Return the digest of a run of `classify` that ends with these weights."""
    model = classifier()
    model.load_state_dict(weights)
    return TrainState(model, adamw(model), None, None, {}).digest()


class Kept:
    """An object of `state=` that keeps a value."""

    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def objects_of(model, optimizer):
    """What the user made: it stays the same objects in all generations."""
    grouped = [p for group in optimizer.param_groups for p in group["params"]]
    return list(map(id, [*model.modules(), *model.parameters(), *model.buffers(), *grouped]))


def adamw(model, **options):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, **options)


def in_small_buckets(train):
    """In a process of its own: gradients go in many collectives, as those of a large model do, and
    the points "sent" and "gather" are passed between any two of them, too."""

    def cut(ctx):
        for limit in ("UNCUT", "FIRST_BUCKET", "LAST_BUCKET", "BUCKET"):
            setattr(gradient_buckets, f"{limit}_BYTES", 256)
        session = ctx._session
        for method, point in {"launch": "sent", "sum_part": "gather"}.items():
            setattr(
                BucketReduction, method, _passing(point, session, getattr(BucketReduction, method))
            )
        train(ctx)
        assert len(session.transaction.leaves.gradients._layout.buckets) >= 3

    return cut


def _passing(point, session, method):
    def passes(exchange):
        if exchange.bucket.first:
            session.pass_point(point, session.position.step + 1)
        return method(exchange)

    return passes


def plain(ctx):
    model = classifier()
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    loop(ctx, model, optimizer, scheduler=scheduler, clip_norm=0.5)


def seventeen(ctx):
    """Columns, and no step between the data and the first matrix product."""
    model = classifier(17)
    loop(ctx, model, adamw(model))


def batch_norm(ctx):
    model = nn.Sequential(
        nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4)
    )
    loop(ctx, model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), clip_norm=1.0)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.second.weight = self.first.weight
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))


def autocast_fp16(ctx):
    """With a loss scale. Some losses are so large that the scaled gradient overflows: those steps
    change nothing."""
    model = classifier()

    def loss_fn(m, batch):
        loss = cross_entropy(m, batch)
        return loss * 1e4 if int(batch["i"].sum()) % 7 == 0 else loss

    loop(ctx, model, adamw(model), loss_fn, precision="fp16", clip_norm=1.0)
    ctx.log({"scale": ctx._session.state.loss_scale.scale})


class Checkpointed(nn.Module):
    """Tied weights under activation checkpointing: with the reentrant kind, hooks fire twice."""

    def __init__(self, reentrant):
        super().__init__()
        self.body = Tied()
        self.reentrant = reentrant

    def forward(self, x):
        x = x.requires_grad_()
        x = checkpoint(lambda y: torch.tanh(self.body.first(y)), x, use_reentrant=self.reentrant)
        x = checkpoint(lambda y: torch.tanh(self.body.second(y)), x, use_reentrant=self.reentrant)
        return self.body.head(F.dropout(x, 0.1, self.training))


def frozen_and_unused(ctx):
    model = nn.ModuleDict(
        {"net": classifier(), "unused": nn.Linear(3, 3), "frozen": nn.Linear(16, 16)}
    )
    model["frozen"].requires_grad_(False)
    optimizer = adamw(model, weight_decay=0.1)

    def loss_fn(m, batch):
        return F.cross_entropy(m["net"](m["frozen"](batch["x"])), batch["y"])

    for step in ctx.steps(model, optimizer, loss_fn):
        if step.number == 4:
            model["frozen"].requires_grad_(True)
        hold(ctx, step)


def branching(ctx):
    """A branch that some micro-batches take and others do not."""
    model = nn.ModuleDict({"net": classifier(), "rare": nn.Linear(16, 4)})

    def loss_fn(m, batch):
        out = m["net"](batch["x"])
        if int(batch["i"].sum()) % 3 == 0:
            out = out + m["rare"](batch["x"])
        return F.cross_entropy(out, batch["y"])

    loop(ctx, model, adamw(model), loss_fn)


def groups(ctx):
    model = classifier()
    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": rest, "weight_decay": 0.0}, {"params": decay, "lr": 3e-3}], lr=1e-2
    )
    loop(ctx, model, optimizer)


class Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        x = x.to(memory_format=torch.channels_last)
        return self.head(F.relu(self.norm(self.conv(x))).mean((2, 3)))


def bf16_parameters(ctx):
    model = classifier().to(torch.bfloat16)

    def loss_fn(m, batch):
        return F.cross_entropy(m(batch["x"].bfloat16()).float(), batch["y"])

    loop(ctx, model, adamw(model), loss_fn)


def fused(ctx):
    model = classifier()
    loop(ctx, model, adamw(model, fused=True))


def lazy_optimizer_state(ctx):
    """Momentum buffers that do not exist before the first step that uses each parameter."""
    model = nn.ModuleDict({"net": classifier(), "late": nn.Linear(16, 4)})

    def loss_fn(m, batch):
        out = m["net"](batch["x"])
        if ctx._session.position.step >= 5:
            out = out + m["late"](batch["x"])
        return F.cross_entropy(out, batch["y"])

    loop(ctx, model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), loss_fn)


class Counting(torch.optim.Optimizer):
    """Keeps a count beside the state of parameters, once more in an attribute, and a list in its
    groups."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.05, "history": [0]})
        self.state["global"]["count"] = torch.zeros(())
        self.state["calls"] = 0
        self.last = {"calls": [0]}

    @torch.no_grad()
    def step(self) -> None:
        self.state["global"]["count"] += 1
        self.state["calls"] += 1
        self.last["calls"][0] += 1
        for group in self.param_groups:
            group["history"] = [*group["history"], len(group["history"])][-5:]
            past = self.last["calls"][0] + self.state["calls"] + sum(group["history"])
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(
                        p.grad * group["lr"] / float(self.state["global"]["count"] + past) ** 0.5
                    )


def optimizer_with_a_state_of_its_own(ctx):
    model = classifier()
    loop(ctx, model, Counting(model.parameters()))


def scheduler_in_the_body(ctx):
    """Each body steps the scheduler twice, and writes into a list that it holds."""
    model = classifier()
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 0.99**k)
    for step in ctx.steps(model, optimizer, cross_entropy, state={"scheduler": scheduler}):
        scheduler.step()
        scheduler.step()
        scheduler.base_lrs[0] *= 0.98
        hold(ctx, step)


class Average:
    """An exponential moving average of the weights, kept in the loop's body."""

    def __init__(self, model):
        self.model = copy.deepcopy(model).requires_grad_(False)

    @torch.no_grad()
    def update(self, model):
        for mine, p in zip(self.model.parameters(), model.parameters(), strict=True):
            mine.lerp_(p, 0.1)

    def state_dict(self):
        return self.model.state_dict()

    def load_state_dict(self, state):
        self.model.load_state_dict(state)


def average_and_plateau(ctx):
    """An EMA and a plateau scheduler in the body: each body must run exactly once in every worker.

    The average enters the loss, so a body run twice, or not at all, changes the final weights.
    """
    model = classifier()
    optimizer = adamw(model)
    average = Average(model)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.7)

    def loss_fn(m, batch):
        with torch.no_grad():
            teacher = average.model.eval()(batch["x"])
        out = m(batch["x"])
        return F.cross_entropy(out, batch["y"]) + 0.1 * F.mse_loss(out, teacher)

    made = objects_of(model, optimizer)
    state = {"ema": average, "plateau": plateau}
    for step in ctx.steps(model, optimizer, loss_fn, state=state):
        assert objects_of(model, optimizer) == made
        average.update(model)
        with torch.no_grad():
            for p in average.model.parameters():  # what a body draws must be equal everywhere, too
                p.add_(1e-3 * torch.randn(p.shape) + 1e-4 * random.random())
        plateau.step(step.loss)
        if step.number % 4 == 0:
            ctx.log(ctx.evaluate(cross_entropy, ctx.config["eval"], model=average.model))
        hold(ctx, step)


def evaluates_after_the_loop(ctx):
    """Evaluates in the last body as in all others, and twice more behind the loop."""
    model = classifier()
    for step in ctx.steps(model, adamw(model), cross_entropy):
        ctx.log(ctx.evaluate(cross_entropy, ctx.config["eval"]))
        hold(ctx, step)
    if not isinstance(ctx._session.link, LocalRun):
        eventually(lambda: os.path.exists(ctx.config["standby_is_ready"]))
    for weight in (2, 3):
        result = ctx.evaluate(lambda m, b, w=weight: w * cross_entropy(m, b), ctx.config["eval"])
        ctx.log({f"final_{weight}": result["eval_loss"]})


def zero_weights(ctx):
    """Some micro-batches weigh nothing, and their loss is not a number."""
    model = classifier()

    def loss_fn(m, batch):
        weight = int(batch["i"].sum()) % 4
        loss = F.cross_entropy(m(batch["x"]), batch["y"])
        return loss if weight else loss * float("nan"), weight, {"weight": weight}

    loop(ctx, model, adamw(model), loss_fn)


def compiled(ctx):
    model = torch.compile(classifier(), backend=ctx.config.get("backend", "inductor"))
    loop(ctx, model, adamw(model))


def clipped_average_norm(ctx):
    """Reads the lazily computed gradient norm in the body, and logs it. No body sees the gradients
    themselves."""
    model = classifier()
    optimizer = adamw(model)
    for step in ctx.steps(model, optimizer, cross_entropy):
        assert all(type(p.grad) is not torch.Tensor for p in model.parameters())
        optimizer.zero_grad()  # by habit; the norm is still there
        assert step.grad_norm > 0
        ctx.log({"norm": step.grad_norm, "loss": step.loss})
        hold(ctx, step)


ZOO = {
    f.__name__: f
    for f in (
        plain,
        batch_norm,
        autocast_fp16,
        frozen_and_unused,
        branching,
        groups,
        bf16_parameters,
        fused,
        lazy_optimizer_state,
        optimizer_with_a_state_of_its_own,
        scheduler_in_the_body,
        average_and_plateau,
        zero_weights,
        clipped_average_norm,
    )
} | {
    "autocast_bf16": partial(classify, precision="bf16"),
    "tied": training(Tied),
    "checkpointed": training(lambda: Checkpointed(False)),
    "checkpointed_reentrant": training(lambda: Checkpointed(True)),
    "channels_last": training(lambda: Convolution().to(memory_format=torch.channels_last)),
}
