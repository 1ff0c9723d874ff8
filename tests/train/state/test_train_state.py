"""State of kinds that torch allows and few jobs have: carried to whoever joins, through a kill, and
by a checkpoint, to the last bit; or refused by name before the first step."""

import contextlib
import enum
import fractions
import functools
import io
import json
import pathlib
import random
import re
import sys
import threading
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import elastic_dp as edp
from elastic_dp.checkpoint import codec
from elastic_dp.checkpoint.codec import decode, encode
from elastic_dp.checkpoint.exporting import naming_of, optimizer_state
from elastic_dp.config import CheckpointConfig
from elastic_dp.errors import LoopError, ModelError
from elastic_dp.train.fault_injection import WorkerFault
from elastic_dp.train.state import held_values
from elastic_dp.train.state.train_state import TrainState, extra_states
from tests.runs import group, local, resize, spec_of
from tests.train import optimizers as zoo
from tests.train.jobs import adamw, classifier, cross_entropy, hold, loop

SLOW = pytest.mark.slow
HALF = 14
BODY = {"body_s": 0.02}


def job(steps, workers, **config):
    every, config = CheckpointConfig(every_steps=HALF), BODY | config
    return spec_of(steps=steps, workers=workers, virtual=6, config=config, checkpoint=every)


def check_carried(train, tmp_path):
    """1 → 3 workers, the first one dies, and all of it again from a checkpoint in new processes: as
    in one undisturbed process. The bodies wait for the three, and it dies when they have made a
    step."""
    calm = local(job(2 * HALF, 1), train)
    dead = tmp_path / "dead"
    fault = WorkerFault("backward", worker="w1", world_size=3, once=str(dead), settled=True)
    first = job(HALF, 1, hold={0: 3})
    url = str(tmp_path / "run")
    outcome, _ = group(first, train, script=[resize(1, 3)], faults=(fault,), url=url)
    assert dead.exists() and outcome.workers_lost == 1
    assert outcome.digest == local(job(HALF, 1), train).digest
    outcome, _ = group(job(2 * HALF, 2), train, url=url)
    assert (outcome.digest, outcome.step) == (calm.digest, 2 * HALF)


def refusal(train):
    """The words in which the run is refused; no step is made."""
    run = None
    with pytest.raises(ModelError) as refused:
        run = local(job(HALF, 1), train)
    assert run is None
    return str(refused.value)


class Sharing(nn.Module):
    """One buffer in two modules. Forward writes to it in place, and replaces another one."""

    def __init__(self):
        super().__init__()
        self.net, self.twin = classifier(), nn.Module()
        self.register_buffer("scale", torch.ones(16), persistent=False)
        self.register_buffer("counts", torch.zeros(3))
        self.twin.register_buffer("counts", self.counts)

    def forward(self, x):
        y = x * self.scale
        if self.training:
            self.twin.counts.add_(x.std())
            self.scale = (x.mean() + 1.0).expand(16)
        return self.net(y + self.counts.sum() * 0.01)


def sharing(ctx):
    model = Sharing()
    loop(ctx, model, adamw(model))
    assert model.scale.stride() == (1,) and model.counts is model.twin.counts


def test_buffer_of_two_modules_is_carried(tmp_path):
    check_carried(sharing, tmp_path)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn])
def test_mean_of_a_narrow_buffer_does_not_overflow(dtype):
    """Eight of these values have a sum that the type does not hold; of float8 torch adds none."""
    largest = torch.full((4,), torch.finfo(dtype).max).to(dtype)

    def train(ctx):
        model = classifier()
        model.register_buffer("scale", torch.ones(4).to(dtype))

        def loss_fn(m, batch):
            m.scale.copy_(largest)
            return cross_entropy(m, batch)

        loop(ctx, model, adamw(model), loss_fn)
        assert torch.equal(model.scale.float(), largest.float())

    local(spec_of(steps=1), train)


@pytest.mark.parametrize("momentum", [pytest.param(0.1, marks=SLOW), None])
def test_batch_norms_of_experts_count_the_steps_in_which_any_micro_batch_used_them(
    momentum, tmp_path
):
    def train(ctx):
        model = nn.ModuleDict(
            {
                name: nn.Sequential(
                    nn.Linear(16, 8), nn.BatchNorm1d(8, momentum=momentum), nn.Linear(8, 4)
                )
                for name in ("one", "other")
            }
        )

        def loss_fn(m, batch):
            expert = "one" if int(batch["i"].sum()) % 5 else "other"
            return F.cross_entropy(m[expert](batch["x"]), batch["y"])

        for step in ctx.steps(model, adamw(model), loss_fn):
            assert int(model["one"][1].num_batches_tracked) == step.number
            assert int(model["other"][1].num_batches_tracked) <= step.number
            hold(ctx, step)

    check_carried(train, tmp_path)


class Extra(nn.Module):
    """State beside tensors, which forward may change."""

    def __init__(self, changes=False):
        super().__init__()
        self.net, self.changes = classifier(), changes
        self.uses, self.own = 0, {"rate": 1.0}

    def get_extra_state(self):
        return {"uses": self.uses, "own": self.own}

    def set_extra_state(self, state):
        self.uses, self.own = state["uses"], state["own"]

    def forward(self, x):
        self.uses = self.uses + 1 if self.changes else 3  # as a cache that the first call fills
        return self.net(x * self.own["rate"])


def test_extra_state_of_modules_is_carried():
    states = [TrainState(m, adamw(m), None, None, {}) for m in (Extra(), Extra())]
    states[0].model.own["rate"] = 0.5
    states[1].adopt(handed_over(states[0]), body=True)
    assert states[1].model.own == {"rate": 0.5}


def test_extra_state_that_the_body_changes_is_refused():
    def train(ctx):
        model = nn.Sequential(Extra())
        for _ in ctx.steps(model, adamw(model), cross_entropy):
            model[0].own["rate"] *= 0.9

    with pytest.raises(LoopError, match=r"changed the extra state '0\._extra_state'.*as state="):
        local(job(HALF, 1), train)


def with_buffers(**buffers):
    model = classifier()
    for name, buffer in buffers.items():
        model.register_buffer(name, buffer)
    return model


def made_in_inference_mode():
    with torch.inference_mode():
        return torch.ones(4)


def scripted():
    with warnings.catch_warnings():  # newer versions of torch warn that it is deprecated
        warnings.simplefilter("ignore")
        return torch.jit.script(classifier())


def with_a_rule():
    model = nn.Sequential(Extra())
    model[0].own["rule"] = lambda x: x
    return model


def view_of_a_parameter():
    model = classifier()
    model.register_buffer("row", model[0].weight.data[0])
    return model


REFUSED_MODELS = {
    "a view in another dtype": (
        lambda: with_buffers(bits=(bits := torch.zeros(8)), words=bits.view(torch.int32)),
        "model.words and model.bits share memory",
    ),
    "a view of a part": (
        lambda: with_buffers(whole=(whole := torch.zeros(8)), part=whole[2:]),
        "model.part and model.whole share memory",
    ),
    "an expanded buffer": (
        lambda: with_buffers(scale=torch.ones(1).expand(16)),
        "model.scale is an expanded tensor",
    ),
    "a view of a parameter": (view_of_a_parameter, "model.0.weight and model.row share memory"),
    "a sparse buffer": (
        lambda: with_buffers(edges=torch.eye(4).to_sparse()),
        "model.edges is not a dense tensor",
    ),
    "a buffer of inference mode": (
        lambda: with_buffers(scale=made_in_inference_mode()),
        "model.scale was made under torch.inference_mode",
    ),
    "a script": (scripted, "model is a TorchScript module"),
    "extra state that forward changes": (
        lambda: nn.Sequential(Extra(changes=True)),
        "forward changed the extra state '0._extra_state' (get_extra_state)",
    ),
    "extra state that cannot be sent": (
        with_a_rule,
        "get_extra_state of model.0 returns at own.rule a builtins.function",
    ),
}


@pytest.mark.parametrize("kind", REFUSED_MODELS)
def test_model_that_cannot_be_carried_is_refused_by_name(kind):
    def train(ctx):
        model = make()
        loop(ctx, model, adamw(model))

    make, words = REFUSED_MODELS[kind]
    assert words in refusal(train)


def with_optimizer(make, scheduler=None, body=None):
    def train(ctx):
        model = classifier()
        optimizer = make(model)
        made = scheduler(optimizer) if scheduler else None
        for step in ctx.steps(model, optimizer, cross_entropy, scheduler=made):
            if body:
                body(optimizer)
            hold(ctx, step)

    return train


def hooked(model):
    """What clips is no attribute: an object that is registered with torch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    class Clip(zoo.History):
        def __call__(self, optimizer, args, kwargs):
            self.past.append(sum(float(p.grad.norm()) for p in model.parameters()))
            for p in model.parameters():
                p.grad.mul_(min(self.past) / self.past[-1])

    optimizer.register_step_pre_hook(Clip())
    return optimizer


def counting_hook(parameters):
    optimizer = torch.optim.SGD(parameters, lr=0.05)
    calls = 0

    def scale(optimizer, args, kwargs):
        nonlocal calls
        calls += 1

    optimizer.register_step_pre_hook(scale)
    return optimizer


def hook_with_a_tensor(parameters):
    optimizer = torch.optim.SGD(parameters, lr=0.05)
    scale = torch.ones(())
    optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: scale.mul_(0.9))
    return optimizer


class Scaling:
    """Has hooks that are methods."""

    def __init__(self, model):
        self.model, self.calls = model, 0
        self.mask, self.scale = torch.ones(()), torch.ones(())

    def masks(self, *_):
        for p in self.model.parameters():
            p.grad *= self.mask

    def counts(self, *_):
        self.calls += 1

    def decays(self, *_):
        self.scale.mul_(0.9)


def with_method(name):
    def make(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        optimizer.register_step_pre_hook(getattr(Scaling(model), name))
        return optimizer

    return with_optimizer(make)


def cycling(scale):
    make = functools.partial(
        torch.optim.lr_scheduler.CyclicLR, base_lr=0.01, max_lr=0.1, scale_fn=scale
    )
    return with_optimizer(lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.5), make)


class Amplitude:
    calls = 0

    def of_cycle(self, _):
        self.calls += 1
        return 1 / self.calls


def decays(optimizer):
    optimizer.decay *= 0.97
    optimizer.scale.mul_(0.99)


CARRIED = {
    "generators": with_optimizer(lambda m: zoo.Noisy(m.parameters())),
    "both around each other": with_optimizer(lambda m: zoo.Lookahead(zoo.AutoClip(m.parameters()))),
    "step hooks": with_optimizer(hooked),
    "attributes that the body changes": with_optimizer(
        lambda m: zoo.OwnTensor(m.parameters()), body=decays
    ),
    "a scheduler of one's own": with_optimizer(adamw, zoo.Cycling),
    "a hook that is a method": with_method("masks"),
    "a cycle's own function": cycling(lambda cycle: 0.9**cycle),
}


@pytest.mark.parametrize("name", CARRIED)
def test_optimizer_state_of_every_kind_is_carried(name, tmp_path):
    check_carried(CARRIED[name], tmp_path)


REFUSED = {
    "an iterator": (zoo.ByIterator, "optimizer.rates is a itertools.cyc"),
    "a plain object": (
        zoo.OfSettings,
        "optimizer.settings is a tests.train.optimizers.Settings; store its content",
    ),
    "a fraction": (lambda p: Dated(p), "optimizer.rate is a fractions.Fraction"),
    "an optimizer that a step makes": (zoo.LateInner, "optimizer.inner was made in a step"),
    "an iterator in state": (
        zoo.LateIterator,
        "optimizer.state[0.weight].rates is a builtins.list_iterator",
    ),
    "views of one vector": (zoo.Flat, "optimizer.state[0.weight].momentum share memory"),
    "a dict by parameter": (zoo.ByParameter, "optimizer.counts is a"),
    "a dict by id": (lambda p: zoo.ByParameter(p, id), "optimizer.counts is a"),
    "a hook that counts": (counting_hook, "step_hooks.0, or a variable that it uses, has changed"),
    "a hook with a tensor": (hook_with_a_tensor, "step_hooks.0 is a function with a Tensor in its"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_optimizer_state_that_cannot_be_carried_is_refused_by_name(kind):
    make, words = REFUSED[kind]
    assert words in refusal(with_optimizer(lambda m: make(m.parameters())))


@pytest.mark.parametrize("name", ["counts", "decays"])
def test_a_hook_that_is_a_method_and_changes_its_object_is_refused(name):
    words = "optimizer.step_hooks.0, or a variable that it uses, has changed"
    assert words in refusal(with_method(name))


def test_state_is_sent_while_a_body_runs():
    """As to a worker that joins while the members evaluate."""
    model = classifier()
    state = TrainState(model, adamw(model), None, None, {})
    state.model_guard.begin()
    assert [*state.tree([], None)["body"]["held"]["optimizers"][0]["hooks"]["values"]] == []


def test_a_cycle_whose_function_counts_is_refused():
    words = "scheduler.scale_fn, or a variable that it uses, has changed"
    assert words in refusal(cycling(Amplitude().of_cycle))


def test_rate_may_be_read_from_a_tensor():
    rates = torch.linspace(1, 0.1, HALF + 1)
    by_table = functools.partial(
        torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda s: float(rates[s])
    )
    local(job(HALF, 1), with_optimizer(lambda m: adamw(m), by_table))


class Harmless(torch.optim.SGD):
    """What many optimizers hold beside their state, and what need not be carried."""

    def __init__(self, parameters, model):
        super().__init__(parameters, lr=0.05)
        self.model, self.layers, self.kind = model, list(model), type(model)
        self.log, self.lock, self.local = zoo.LOG, threading.Lock(), threading.local()
        self.stream = contextlib.nullcontext()
        self.kernel, self.rule = torch._C._get_cpp_backtrace, functools.partial(max, 0)
        self.out, self.write = sys.stdout, sys.stdout.write
        self.sentinel, self.dtype, self.device = object(), torch.float32, torch.device("cpu")
        self.draw, self.pattern, self.level = random.random, re.compile("a"), enum.Enum("L", "a").a
        self.param_groups[0]["schedule"] = lambda step: step
        self.cached = functools.cache(lambda x: x)
        self.file = pathlib.Path("somewhere")


class Dated(torch.optim.SGD):
    def __init__(self, parameters):
        super().__init__(parameters, lr=0.05)
        self.rate = fractions.Fraction(1, 2)


def test_optimizer_attributes_that_need_not_be_carried_are_not_refused(tmp_path):
    train = with_optimizer(lambda m: Harmless(m.parameters(), m))
    spec = job(HALF, 1)
    assert local(spec, train, str(tmp_path)).digest == local(spec, train).digest
    source = stepped(lambda m: Harmless(m.parameters(), m), 2)
    joined = stepped(lambda m: Harmless(m.parameters(), m), 0, seed=1)
    lock = joined.optimizer.lock
    joined.adopt(handed_over(source), body=True)
    assert joined.optimizer.lock is lock and joined.optimizer.model is joined.model


def stepped(make, steps, seed=0):
    """A state after so many steps, with its model."""
    torch.manual_seed(seed)
    model = classifier().double()
    state = TrainState(model, make(model), None, None, {})
    for _ in range(steps):
        advance(state)
    return state


def advance(state):
    torch.manual_seed(int(state.model[0].weight.sum() * 1e6) % 1000)
    state.model(torch.randn(4, 16).double()).square().mean().backward()
    state.optimizer.step()
    state.optimizer.zero_grad()
    state.note_commit()


def handed_over(state):
    encoded, tensors = encode(state.tree([], None))
    tensors = [tensor.clone() for _, tensor in tensors]
    return decode(json.loads(json.dumps(encoded)), tensors)


def test_member_behind_takes_what_the_step_made_of_attributes_and_runs_its_own_body():
    """The one ahead has run its body already: who takes the step from it must not have that body's
    change twice."""
    ahead, behind = (stepped(lambda m: zoo.OwnTensor(m.parameters()), 2) for _ in range(2))
    advance(ahead)
    decays(ahead.optimizer)
    behind.adopt(handed_over(ahead), body=False)
    assert behind.optimizer.decay == 1.0
    decays(behind.optimizer)
    joined = stepped(lambda m: zoo.OwnTensor(m.parameters()), 0, seed=1)
    joined.adopt(handed_over(ahead), body=True)
    assert behind.optimizer.decay == joined.optimizer.decay == ahead.optimizer.decay == 0.97
    own = joined.optimizers.committed["optimizers"][0]["attributes"]
    assert own["values"]["decay"] == 1.0


def test_state_that_a_behind_member_and_a_joiner_took_goes_on_as_the_source_s():
    for make in (
        lambda m: zoo.Noisy(m.parameters()),
        lambda m: zoo.AutoClip(m.parameters()),
        lambda m: zoo.Preconditioned(m.parameters()),
        zoo.Both,
    ):
        ahead, behind = (stepped(make, 2) for _ in range(2))
        joined = stepped(make, 0, seed=1)
        advance(ahead)
        behind.adopt(handed_over(ahead), body=False)
        joined.adopt(handed_over(ahead), body=True)
        again = stepped(make, 0, seed=2)
        again.adopt(handed_over(joined), body=True)
        for state in (ahead, behind, joined, again):
            advance(state)
            advance(state)
        assert behind.digest() == joined.digest() == again.digest() == ahead.digest(), make


def test_state_of_an_optimizer_of_the_run_is_exported_in_plain_types():
    state = stepped(lambda m: zoo.Preconditioned(m.parameters()), 2)
    exported = optimizer_state(handed_over(state), naming_of(state.model, state.optimizer))
    kept = state.optimizer.state[state.model[0].weight]["kept"]
    assert torch.equal(exported["state"][0]["kept"]["terms"][0], kept["terms"][0])
    assert list(exported["state"][0]["past"])
    assert exported["param_groups"] == state.optimizer.state_dict()["param_groups"]


def torch_s_own():
    """All that a step can run, with states made in __init__ or late."""
    skipped = {"Optimizer", "LBFGS", "SparseAdam", "Muon"}
    return [
        cls
        for name, cls in vars(torch.optim).items()
        if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer) and name not in skipped
    ]


def hugging_face(parameters):
    from transformers.optimization import Adafactor

    return Adafactor(parameters)


class Scaler:
    """An object like a loss scaler, which carries itself."""

    def __init__(self):
        self.rule, self.scale = iter([]), 1.0

    def state_dict(self):
        return {"scale": self.scale, "extra": (1, None)}

    def load_state_dict(self, state):
        self.scale = state["scale"]


class Holding(torch.optim.SGD):
    """Holds what carries itself: a scaler, an average of the model, a compiled model and a
    scheduler."""

    def __init__(self, parameters, model):
        super().__init__(parameters, lr=0.05)
        self.scaler, self.average = Scaler(), torch.optim.swa_utils.AveragedModel(model)
        self.compiled = torch.compile(model)
        self.rates = torch.optim.lr_scheduler.StepLR(self, 2)

    def step(self):
        self.scaler.scale *= 0.99
        for p, mean in zip(self.param_groups[0]["params"], self.average.parameters(), strict=True):
            p.grad.mul_(self.scaler.scale).add_(mean.detach(), alpha=0.01)
        super().step()
        self.average.update_parameters(self.compiled)
        self.rates.step()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, as it imports its compiler
@pytest.mark.parametrize(
    "make",
    [
        *(lambda m, cls=cls: cls(m.parameters(), lr=0.01) for cls in torch_s_own()),
        lambda m: hugging_face(m.parameters()),
        lambda m: torch.optim.Adam(m.parameters(), lr=torch.tensor(0.01)),
        lambda m: Holding(m.parameters(), m),
        lambda m: zoo.Lookahead(Holding(m.parameters(), m)),
    ],
    ids=[
        *(cls.__name__ for cls in torch_s_own()),
        "transformers",
        "tensor lr",
        "holding",
        "around",
    ],
)
def test_optimizer_that_joined_goes_on_as_the_source_s(make):
    source = stepped(make, 3)
    joined = stepped(make, 0, seed=1)
    joined.adopt(handed_over(source), body=True)
    for state in (source, joined):
        advance(state)
        advance(state)
    assert joined.digest() == source.digest()


def test_extra_state_that_is_a_file_in_memory_is_carried():
    class Scales(nn.Linear):
        scale = 1.0

        def get_extra_state(self):
            return io.BytesIO(json.dumps(self.scale).encode())

        def set_extra_state(self, state):
            self.scale = json.loads(state.read())

    source, taker = (Scales(2, 2) for _ in range(2))
    source.scale = 0.25
    [given], [mine] = extra_states(source), extra_states(taker)
    mine.write(given.read())
    assert taker.scale == 0.25


def test_registered_type_is_carried_into_the_object_that_is_there(monkeypatch):
    monkeypatch.setattr(codec, "STATE_TYPES", dict(codec.STATE_TYPES))
    monkeypatch.setattr(held_values, "STATE_TYPES", codec.STATE_TYPES)
    with pytest.raises(TypeError, match="needs get= and set="):
        edp.register_state_type(zoo.Settings)
    edp.register_state_type(
        zoo.Settings, get=lambda one: one.rate, set=lambda one, rate: setattr(one, "rate", rate)
    )
    source, joined = (stepped(lambda m: zoo.OfSettings(m.parameters()), 1, i) for i in range(2))
    source.optimizer.settings.rate, mine = 0.3, joined.optimizer.settings
    joined.adopt(handed_over(source), body=True)
    assert joined.optimizer.settings is mine and mine.rate == 0.3
