"""Models that change themselves when the rows ask for it: exact, or refused by name."""

import pytest
import torch
from torch import nn

from elastic_dp.errors import ModelError
from tests.runs import group, local, spec_of
from tests.train.jobs import adamw, classifier, cross_entropy

LATER = 93  # rows beyond this index are not in the first micro-batch


def job(steps, workers=1):
    return spec_of(steps=steps, workers=workers, virtual=6)


class Grows(nn.Module):
    """Keeps the largest row that it has seen, and a tensor that it makes of it."""

    def __init__(self):
        super().__init__()
        self.net, self.largest, self.scale, self.calls = classifier(), 0, torch.ones(()), 0

    def forward(self, x, i):
        self.calls += 1
        if (largest := int(i.max())) > max(self.largest, LATER):
            self.largest, self.scale = largest, torch.tensor(1.0 + largest / 100)
        return self.net(x * self.scale)


def grows(ctx):
    model = Grows()

    def loss_fn(m, batch):
        return nn.functional.cross_entropy(m(batch["x"], batch["i"]), batch["y"])

    for _ in ctx.steps(model, adamw(model), loss_fn):
        assert model.largest == 0 and float(model.scale) == 1.0
    assert model.calls > 1, "a counter goes on"


def test_attributes_that_some_rows_change_are_undone_after_each_micro_batch():
    alone = local(job(12), grows)
    outcome, _ = group(job(12, workers=3), grows)
    assert outcome.error is None, outcome.traceback
    assert outcome.digest == alone.digest


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

        for _ in ctx.steps(model, adamw(model), loss_fn):
            pass

    words = r"changed max_seq_len_cached \(16, then .*24.* of model\.model\.rotary_emb together"
    if workers == 1:
        with pytest.raises(ModelError, match=words):
            local(job(12), train)
    else:
        outcome, _ = group(job(12, workers=workers), train)
        assert "changed max_seq_len_cached (16, then" in outcome.error


def test_buffer_of_another_dtype_or_shape_is_refused_with_the_way_out():
    def train(ctx):
        model = classifier()
        model.register_buffer("table", torch.ones(4))

        def loss_fn(m, batch):
            if int(batch["i"].max()) > LATER:
                m.table = m.table.to(torch.bfloat16)
            return cross_entropy(m, batch)

        for _ in ctx.steps(model, adamw(model), loss_fn):
            pass

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
