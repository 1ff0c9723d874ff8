"""A mistake in a train function is one typed error that names what is wrong and the way out."""

import threading

import pytest
import torch
from torch import nn

import elastic_dp as edp
from elastic_dp.errors import LoopError, LossError, ModelError, SpecError
from tests.bad_input.jobs import HUGE, fails, not_finite, synchronised
from tests.runs import Points
from tests.train.jobs import adamw, classifier, cross_entropy

DATA = edp.MapStyleData(Points(8), micro_batch_size=4)
ENDLESS = []
ENDLESS.append(ENDLESS)
NO_GRADIENT = ["step 1", "virtual worker 0", "no gradient", "weight 0"]
PLATEAU = ["ReduceLROnPlateau", "metrics", "scheduler.step(step.loss)", 'state={"scheduler"']


class Closure(torch.optim.SGD):
    def step(self, closure):
        closure()


class Around(torch.optim.SGD):
    def __init__(self, outer, inner):
        super().__init__(outer.param_groups, lr=0.1)
        self.inner = inner


class Held:
    def state_dict(self):
        return {"count": 1, "held": [{"lock": threading.Lock()}]}

    load_state_dict = print


class Remembers(nn.Module):
    """Makes its buffer of the first rows, in the first forward pass."""

    def __init__(self):
        super().__init__()
        self.inner = classifier()
        self.register_buffer("mean", None)

    def forward(self, x):
        if self.mean is None:
            self.mean = x.mean()
        return self.inner(x) + self.mean


def with_phase():
    model = classifier()
    model.phase = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    return model


def partly_on_meta():
    model = classifier()
    model[4].to("meta")
    return model


def no_scalar(m, b):
    return nn.functional.cross_entropy(m(b["x"]), b["y"], reduction="none")


def rarely_sparse(m, b):
    looked_up = nn.functional.embedding(b["y"], m[0].weight, sparse=True)
    return cross_entropy(m[1], b) + (looked_up.sum() if 17 in b["i"] else 0.0)


def normalized():
    return nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))


@torch.no_grad()
def halves(tensor):
    tensor.mul_(0.5)


def grows(body, model=classifier):
    return {"body": body, "model": model}


def logs(value):
    return {"body": lambda m, s, c: c.log(value)}


LOADER = torch.utils.data.DataLoader(Points(8))


def evaluates(fn, data, **options):
    return {"body": lambda m, s, c: c.evaluate(fn, data, **options)}


def beside(*more):
    return {"loss_fn": lambda m, b: (cross_entropy(m, b), *more)}


MISTAKES = {
    LoopError: [
        (["after step 3", "ctx.stop(reason)"], {"body": lambda m, s, c: s.number == 3 and "break"}),
        # Another number of workers would make of its rows, and a joiner would lack it.
        (
            ["model.late was added", "before the loop"],
            grows(lambda m, s, c: m.register_buffer("late", torch.ones(3))),
        ),
        (["model.5 was added"], grows(lambda m, s, c: m.add_module("5", nn.Linear(4, 4)))),
        (
            ["model.0.extra was added"],
            grows(lambda m, s, c: m[0].register_parameter("extra", m[0].bias)),
        ),
        (["model.mean was added"], grows(None, Remembers)),
        (["0.weight", "state="], grows(lambda m, s, c: halves(m[0].weight), normalized)),
        (
            ["1.running_mean", "state="],
            grows(lambda m, s, c: halves(m[1].running_mean), normalized),
        ),
        (["ctx.log got a int", "mapping"], logs(3)),
        (["more than 32 levels"], logs({"x": ENDLESS})),
        # Another time in a line would cost a controller that takes over its place in the record.
        *(([f"named '{x}'", "another name"], logs({x: 1})) for x in ("time", "event", "command")),
        (["named 'step'", "step 1"], logs({"step": 7})),
    ],
    LossError: [
        (["shape (4,)", "scalar"], {"loss_fn": no_scalar}),
        (["float"], {"loss_fn": lambda m, b: 1.0}),
        (["complex64", "real"], {"loss_fn": lambda m, b: cross_entropy(m, b) * 1j}),
        # Otherwise nothing would be learnt, silently.
        (NO_GRADIENT, {"loss_fn": lambda m, b: cross_entropy(m, b).detach()}),
        (NO_GRADIENT, {"model": lambda: classifier().requires_grad_(False)}),
        (["weight", "NoneType"], beside(None)),
        (["weight of a micro-batch is 1e+31", "at most 1e+30"], beside(1e31)),
        (["weight of a micro-batch is a _Huge"], beside(HUGE)),
        (["add up to 8e-32", "multiply all"], beside(1e-32)),
        (["weight", "dict", "(loss, weight, metrics)"], beside({"accuracy": 1.0})),
        (["metrics", "list", "mapping"], beside(4, [1.0])),
        (["'accuracy'", "shape (2,)", "number"], beside(4, {"accuracy": torch.ones(2)})),
        (["'accuracy'", "NoneType"], beside(4, {"accuracy": None})),
        (["'accuracy'", "str"], beside(4, {"accuracy": "0.5"})),
        # In a generator StopIteration would be another error, or the loop's end.
        (["raised StopIteration", "next()"], {"loss_fn": lambda m, b: next(iter(()))}),
        (["step ", "virtual worker ", "17"], {"loss_fn": not_finite}),
    ],
    # Before the first step: nothing may fail between its commit and its end.
    ModelError: [
        (["NoneType as optimizer"], {"optimizer": lambda m: None}),
        (["Linear as optimizer"], {"optimizer": lambda m: m[0]}),
        (["Closure", "'closure'"], {"optimizer": lambda m: Closure(m.parameters())}),
        (["SparseAdam"], {"optimizer": lambda m: torch.optim.SparseAdam(m.parameters())}),
        (["LBFGS"], {"optimizer": lambda m: torch.optim.LBFGS(m.parameters())}),
        (["not a parameter of"], {"optimizer": lambda m: adamw(classifier())}),
        (
            ["optimizer.inner", "not a parameter of"],
            {"optimizer": lambda m: Around(adamw(m), adamw(classifier()))},
        ),
        (
            ["optimizer.inner", "LBFGS"],
            {"optimizer": lambda m: Around(adamw(m), torch.optim.LBFGS(m.parameters()))},
        ),
        (["model.phase", "complex64", "view_as_real"], {"model": with_phase}),
        (
            ["model.0.weight has no shape yet", "before the optimizer"],
            {"model": lambda: nn.Sequential(nn.LazyLinear(4))},
        ),
        (["model.4.weight", "meta device", "to_empty"], {"model": partly_on_meta}),
        (["model.1", "SyncBatchNorm", "BatchNorm"], {"model": synchronised}),
        (["sparse=False"], {"model": lambda: nn.Sequential(nn.Embedding(4, 4, sparse=True))}),
        (
            ["model.0.weight", "sparse=False"],
            {
                "loss_fn": rarely_sparse,
                "model": lambda: nn.ModuleList([nn.Embedding(4, 3), classifier()]),
            },
        ),
        (["str as model"], evaluates(cross_entropy, DATA, model="m")),
    ],
    SpecError: [
        (["clip_norm is '1'", "number"], {"clip_norm": "1"}),
        (["clip_norm is nan"], {"clip_norm": float("nan")}),
        (["clip_value is 0"], {"clip_value": 0}),
        (["leave out one of the two"], {"clip_norm": 1.0, "clip_value": 1.0}),
        (["precision is 'bfloat16'", "'bf16'"], {"precision": "bfloat16"}),
        (["loss_fn is a NoneType"], {"loss_fn": None}),
        (["loss_fn takes (m)", "(model, batch)"], {"loss_fn": lambda m: m}),
        (["state is a list", "dict"], {"state": [classifier()]}),
        (["state['a'] is a dict", "load_state_dict()"], {"state": {"a": {"n": 1}}}),
        # After the first step, the model would be ahead of its scheduler.
        (PLATEAU, {"scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau}),
        (["object", "no step()"], {"scheduler": lambda o: object()}),
        (
            ["state['mine'].state_dict() cannot be sent to a worker that joins: held.0.lock is"],
            {"state": {"mine": Held()}},
        ),
        (["fn is a NoneType"], evaluates(None, DATA)),
        (["data is a NoneType"], evaluates(cross_entropy, None)),
        (["MapStyleData(loader.dataset"], evaluates(cross_entropy, LOADER)),
    ],
}


@pytest.mark.parametrize(
    ("kind", "words", "made"),
    [(kind, *mistake) for kind, mistakes in MISTAKES.items() for mistake in mistakes],
    ids=lambda one: one[0] if isinstance(one, list) else "",
)
def test_mistake_is_one_typed_error_that_names_it(kind, words, made):
    fails(kind, words, **made)
