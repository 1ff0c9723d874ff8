"""Optimizers of torchao, whose state has 4 or 8 bits a value, or which round at random, and its
products in fp8: the same bits on one worker and on three, with a join, a kill and a restore."""

from importlib.util import find_spec

import pytest
import torch
from torch import nn

from elastic_dp.config import CheckpointConfig
from elastic_dp.errors import ModelError
from tests import runs
from tests.imported_when_used import ImportedWhenUsed
from tests.runs import local, spec_of
from tests.train.jobs import cross_entropy, hold, loop

pytestmark = pytest.mark.skipif(find_spec("torchao") is None, reason="needs torchao")
low_bit = ImportedWhenUsed("torchao.optim")
float8 = ImportedWhenUsed("torchao.float8")

OPTIMIZERS = {
    "8bit": "AdamW8bit",
    "4bit": "AdamW4bit",
    "fp8": "AdamWFp8",
    "rounded at random": "_AdamW",
}


def model_of(name):
    """Return a model whose matrices are large enough to be quantized: 4096 values."""
    model = nn.Sequential(nn.Linear(16, 256), nn.LayerNorm(256), nn.ReLU(), nn.Linear(256, 64))
    return model.to(torch.bfloat16) if name == "rounded at random" else model


def optimizer_of(name, model):
    options = {"bf16_stochastic_round": True} if name == "rounded at random" else {}
    return getattr(low_bit, OPTIMIZERS[name])(model.parameters(), lr=3e-3, **options)


def loss_of(model, batch):
    dtype = next(model.parameters()).dtype
    return cross_entropy(lambda x: model(x.to(dtype)).float(), batch)


def training(name):
    def train(ctx):
        with torch.compiler.set_stance("force_eager"):  # torchao compiles the update of a parameter
            model = model_of(name)
            for step in ctx.steps(model, optimizer_of(name, model), loss_of):
                ctx.log({"loss": step.loss})
                hold(ctx, step)

    return train


def fit(folder, train, max_steps):
    every_2 = CheckpointConfig(every_steps=2)
    return runs.fit(train, folder, max_steps, virtual=4, checkpoint=every_2)


def test_restored_state_has_few_bits(tmp_path):
    def train(ctx):
        with torch.compiler.set_stance("force_eager"):
            model = model_of("8bit")
            optimizer = optimizer_of("8bit", model)
            for _ in ctx.steps(model, optimizer, loss_of):
                moment = optimizer.state[model[3].weight]["exp_avg"]
                ctx.log({"quantized": float(type(moment).__name__ == "OptimState8bit")})

    for steps in (1, 2):
        assert fit(tmp_path, train, steps).metrics["quantized"] == 1.0


def train_in_fp8(ctx):
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))
    float8.convert_to_float8_training(model, config=float8.Float8LinearConfig(emulate=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in ctx.steps(model, optimizer, cross_entropy):
        ctx.log({"loss": step.loss})
        hold(ctx, step)


TRAININGS = {name: training(name) for name in OPTIMIZERS} | {"products in fp8": train_in_fp8}


@pytest.mark.parametrize("name", TRAININGS)
def test_restored_run_has_the_weights_of_the_one_at_once_and_learns(name, tmp_path):
    at_once = fit(tmp_path / "at once", TRAININGS[name], 12)
    fit(tmp_path / "parts", TRAININGS[name], 3)
    restored = fit(tmp_path / "parts", TRAININGS[name], 12)
    assert restored.weights_sha256 == at_once.weights_sha256
    assert at_once.metrics["loss"] < 3.5  # of 64 classes, of which 4 occur; at first about 4.2


class Wrapping(torch.Tensor):
    """A subclass that is made of more than tensors and values."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    def __tensor_flatten__(self):
        return ["inner"], object()

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return Wrapping(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(func)


class Wraps(torch.optim.SGD):
    def step(self):
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["wrapped"] = Wrapping(torch.zeros(3))


def test_tensor_made_of_other_objects_is_refused_by_name():
    def train(ctx):
        model = model_of("8bit")
        loop(ctx, model, Wraps(model.parameters(), lr=0.1), loss_of)

    with pytest.raises(ModelError, match=r"state\[0.weight\].wrapped is a tests.*Wrapping; only"):
        local(spec_of(steps=2), train)
