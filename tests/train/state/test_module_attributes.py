"""Models that change themselves when the rows ask for it: exact, or refused by name."""

import collections
import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

from elastic_dp.errors import ModelError
from elastic_dp.train.state.module_attributes import ModuleAttributes
from tests.runs import formed_of, group, local, resize, spec_of
from tests.train.jobs import adamw, classifier, cross_entropy, hold, loop

LATER = 93  # rows beyond this index are not in the first micro-batch


def job(steps, workers=1):
    return spec_of(steps=steps, workers=workers, virtual=6)


def unweighted():
    return 1.0


class Holder(nn.Module):
    """Has one attribute of each kind, of which the result depends."""

    def __init__(self):
        super().__init__()
        self.net, self.leaky, self.drop = classifier(), nn.LeakyReLU(), nn.Dropout(0.5)
        self.number, self.absent, self.scale = 1.0, None, torch.ones(())
        self.by_name, self.counts = {"factor": 1.0}, collections.defaultdict(float)
        self.past, self.window = [1.0], collections.deque([1.0], maxlen=2)
        self.seen, self.table, self.weigh = {1.0}, np.ones(3), unweighted

    def forward(self, x):
        factors = [self.number, self.absent or 1.0, self.by_name["factor"], self.counts["n"] + 1.0]
        factors += [sum(self.past), sum(self.window), max(self.seen), float(self.table.sum())]
        factors += [getattr(self, "late", 1.0), self.weigh()]
        return self.drop(self.leaky(self.net(x)) * self.scale * math.prod(factors))


CHANGES = {
    "number": lambda m, x: setattr(m, "number", m.number + x),
    "absent": lambda m, x: setattr(m, "absent", x),
    "tensor": lambda m, x: setattr(m, "scale", m.scale + x),
    "dict": lambda m, x: m.by_name.update(factor=m.by_name["factor"] + x),
    "key of a dict": lambda m, x: m.by_name.update({str(x): x}, factor=x),
    "defaultdict": lambda m, x: m.counts.update(n=m.counts["n"] + x),
    "list": lambda m, x: m.past.append(x),
    "deque": lambda m, x: m.window.append(x),
    "set": lambda m, x: m.seen.add(x + 2),
    "array": lambda m, x: m.table.__setitem__(1, m.table[1] + x),
    "another dict": lambda m, x: setattr(m, "by_name", {"factor": x}),
    "new attribute": lambda m, x: setattr(m, "late", x),
    "of a layer of torch": lambda m, x: setattr(m.leaky, "negative_slope", x),
    "function": lambda m, x: setattr(m, "weigh", lambda: x),
    "mode of a module": lambda m, x: m.drop.eval(),
}


def state_of(model):
    kinds = [copy.copy(value) for key, value in vars(model).items() if not key.startswith("_")]
    return str([kinds, model.leaky.negative_slope, model.drop.training])


@pytest.mark.parametrize("kind", CHANGES)
def test_a_change_of_each_kind_is_undone(kind):
    model = Holder()
    model(torch.zeros(2, 16))  # a defaultdict has its key
    attributes, before = ModuleAttributes(model), state_of(model)
    for x in (0.5, 0.25):
        CHANGES[kind](model, x)
        assert state_of(model) != before
        attributes.undo()
        assert state_of(model) == before


def test_changes_of_all_kinds_at_once_depend_on_no_worker():
    def train(ctx):
        model = Holder()

        def loss_fn(m, batch):
            if (largest := int(batch["i"].max())) > LATER:
                for change in CHANGES.values():
                    change(m, largest / 1000)
            return nn.functional.cross_entropy(m(batch["x"]), batch["y"])

        loop(ctx, model, adamw(model), loss_fn)

    alone = local(job(12), train)
    outcome, _ = group(job(12, workers=3), train)
    assert outcome.digest == alone.digest


def test_what_each_micro_batch_leaves_in_a_module_stays():
    """Such as activations that are kept to be looked at, also if no attribute was there before."""

    class Keeps(Holder):
        def forward(self, x):
            self.absent, self.kept = None, x
            self.past.append(1.0)
            return super().forward(x)

    model, rows = Keeps(), [torch.full((2, 16), float(n)) for n in range(4)]
    attributes = ModuleAttributes(model)
    for row in rows[:2]:
        model(row)
        attributes.tried()
    attributes.begin()
    for row in rows[2:]:
        model(row)
        attributes.undo()
        assert model.kept is row
    assert len(model.past) == 5


def test_a_tensor_that_some_rows_change_in_place_is_refused_by_name():
    def train(ctx):
        model = Holder()

        def loss_fn(m, batch):
            if int(batch["i"].max()) > LATER:
                m.scale.add_(1)
            return nn.functional.cross_entropy(m(batch["x"]), batch["y"])

        loop(ctx, model, adamw(model), loss_fn)

    with pytest.raises(ModelError, match=r"changed model\.scale in place.*register_buffer"):
        local(job(12), train)


@pytest.mark.parametrize("workers", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_dynamic_rotary_embedding_is_refused_by_name_once_a_longer_row_comes(workers):
    def train(ctx):
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=16,
            rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
        )
        model = LlamaForCausalLM(config)

        def loss_fn(m, batch):
            length = 24 if int(batch["i"].max()) > LATER else 8
            ids = (batch["i"][:, None] + torch.arange(length)) % 32
            return m(input_ids=ids, labels=ids).loss

        loop(ctx, model, adamw(model), loss_fn)

    words = r"changed max_seq_len_cached \(16, then .*24.* of model\.model\.rotary_emb together"
    if workers == 1:
        with pytest.raises(ModelError, match=words):
            local(job(12), train)
    else:
        outcome, _ = group(job(12, workers=workers), train, fails=True)
        assert "changed max_seq_len_cached (16, then" in outcome.error


def test_buffer_of_another_dtype_or_shape_is_refused_with_the_way_out():
    def train(ctx):
        model = classifier()
        model.register_buffer("table", torch.ones(4))

        def loss_fn(m, batch):
            if int(batch["i"].max()) > LATER:
                m.table = m.table.to(torch.bfloat16)
            return cross_entropy(m, batch)

        loop(ctx, model, adamw(model), loss_fn)

    with pytest.raises(
        ModelError, match=r"'table' .*bfloat16\)\. Give it its last shape and dtype"
    ):
        local(job(12), train)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("enabled", [True, False])
def test_observer_of_quantization_is_refused_before_the_first_step(enabled):
    import torch.ao.quantization as quantization

    def train(ctx):
        model = nn.Sequential(quantization.QuantStub(), *classifier()).train()
        model.qconfig = quantization.get_default_qat_qconfig("x86")
        quantization.prepare_qat(model, inplace=True)
        model(torch.randn(8, 16))
        if not enabled:
            model.apply(quantization.disable_observer)
        for step in ctx.steps(model, adamw(model), cross_entropy):
            assert not enabled, step

    if enabled:
        with pytest.raises(ModelError, match="disable_observer"):
            local(job(2), train)
    else:
        local(job(2), train)


def changes_in_the_body(ctx):
    model, last = classifier(), 0.0
    model.last, model.mask = last, torch.zeros(4)
    for step in ctx.steps(model, adamw(model), cross_entropy):
        assert model.last == float(model.mask[0]) == last
        last = model.last = model.mask[0] = float(step.number)
        hold(ctx, step)


def test_what_a_body_has_changed_stays_when_the_group_changes_after_it():
    """An attribute was what it had been before, and a tensor ended the run."""
    spec = spec_of(steps=8, workers=1, virtual=6, config={"hold": dict.fromkeys(range(1, 7), 3)})
    _, run = group(spec, changes_in_the_body, script=[resize(1, 3)])
    assert len(formed_of(run)) > 1
