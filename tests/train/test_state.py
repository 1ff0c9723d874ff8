"""State of kinds that torch allows and few jobs have: carried to whoever joins, through a kill, and by a checkpoint, to
the last bit; or refused by name before the first step."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from elastic_dp.errors import ModelError
from elastic_dp.spec import CheckpointConfig, MapStyleData
from tests.patience import eventually
from tests.runs import Points, goes_on, group, local, resize, spec_of
from tests.train.jobs import adamw, classifier, cross_entropy, hold, loop

HALF = 14
BODY = {"body_s": 0.02}


def job(steps, workers, **config):
    spec = spec_of(steps=steps, workers=workers, virtual=6, config=BODY | config)
    return dataclasses.replace(spec, checkpoint=CheckpointConfig(every_steps=HALF))


def kill_one(run):
    """One that is not alone, when all of them hold the state."""

    def three_train():
        now = run.controller.status()
        return now["size"] == 3 and sum(w == "member" for w in now["workers"].values()) == 3

    eventually(lambda: three_train() or run.controller.ended.is_set(), run.controller.status)
    goes_on(run)
    if not run.controller.ended.is_set():
        members = [
            w for w, stage in run.controller.status()["workers"].items() if stage == "member"
        ]
        run.fleet.kill(sorted(members)[0])


def check_carried(train, tmp_path):
    """1 → 3 workers, a kill, and all of it again from a checkpoint in new processes: as in one undisturbed process."""
    calm = local(job(2 * HALF, 1), train)
    gate = tmp_path / "killed"
    script = [resize(2, 3), (2, lambda run: (kill_one(run), gate.touch()))]
    first = job(HALF, 1, hold={2: 3}, gates={HALF - 1: str(gate)})
    outcome, _ = group(first, train, script=script, url=str(tmp_path / "run"))
    assert outcome.error is None, outcome.traceback
    assert outcome.workers_lost == 1
    assert outcome.digest == local(job(HALF, 1), train).digest
    outcome, _ = group(job(2 * HALF, 2), train, url=str(tmp_path / "run"))
    assert outcome.error is None, outcome.traceback
    assert (outcome.digest, outcome.step) == (calm.digest, 2 * HALF)


def refusal(train):
    """The words in which the run is refused; no step is made."""
    run = None
    with pytest.raises(ModelError) as refused:
        run = local(job(HALF, 1), train)
    assert run is None
    return str(refused.value)


# ------------------------------------------------------------------------------------- buffers


class Sharing(nn.Module):
    """Expanded buffers, views of one vector, one buffer in two modules, and a view of a parameter; forward writes."""

    def __init__(self):
        super().__init__()
        self.net, self.twin = classifier(), nn.Module()
        self.register_buffer("scale", torch.ones(1).expand(16))
        self.register_buffer("mean", torch.zeros(4, 1).expand(4, 16))
        both = torch.zeros(8)
        self.register_buffer("first", both[:6])
        self.register_buffer("last", both[2:], persistent=False)
        self.register_buffer("counts", torch.zeros(3))
        self.twin.register_buffer("counts", self.counts)
        self.register_buffer("of_weight", self.net[0].weight.data[0])

    def forward(self, x):
        y = x * self.scale + self.mean.sum() + self.first.mean() + self.last.mean()
        if self.training:
            self.first.add_(x.mean() * 0.1)
            self.twin.counts.add_(x.std())
            self.mean[:, :1].add_(x[:4, :1] * 0.01)
            self.scale = (x.mean() + 1.0).expand(16)
        return self.net(y + self.counts.sum() * 0.01 + self.of_weight)


def sharing(ctx):
    model = Sharing()
    loop(ctx, model, adamw(model))
    assert model.scale.stride() == (0,) and model.counts is model.twin.counts
    assert torch.equal(model.first[2:], model.last[:4])
    assert torch.equal(model.of_weight, model.net[0].weight[0])


def test_buffers_that_share_memory_are_carried(tmp_path):
    check_carried(sharing, tmp_path)


def test_buffer_in_memory_that_another_one_sees_in_another_dtype_is_refused_by_name():
    def train(ctx):
        model = classifier()
        model.register_buffer("bits", torch.zeros(8))
        model.register_buffer("words", model.bits.view(torch.int32))
        loop(ctx, model, adamw(model))

    assert "'words' (torch.int32) shares memory with 'bits' (torch.float32)" in refusal(train)


def test_sparse_buffer_is_refused_by_name_before_the_first_step():
    def train(ctx):
        model = classifier()
        model.register_buffer("edges", torch.eye(4).to_sparse())
        loop(ctx, model, adamw(model))

    assert "model.edges is not a dense tensor" in refusal(train)


@pytest.mark.parametrize("momentum", [0.1, None])
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


def test_integer_buffer_that_counts_rows_is_still_refused_by_name():
    def train(ctx):
        model = classifier()
        model.register_buffer("seen", torch.zeros((), dtype=torch.long))

        def loss_fn(m, batch):
            m.seen += int(batch["i"].sum()) % 7
            return cross_entropy(m, batch)

        loop(ctx, model, adamw(model), loss_fn)

    words = refusal(train)
    assert "buffer 'seen' (torch.int64) differs between virtual workers" in words
    assert "num_batches_tracked" in words


# ---------------------------------------------------------------------------------- extra state


class Extra(nn.Module):
    """State beside tensors: `step` as forward counts it, `own` as the body writes it."""

    def __init__(self, by_rows=False):
        super().__init__()
        self.net, self.by_rows = classifier(), by_rows
        self.uses, self.own = 0, {"rate": 1.0, "past": np.zeros(3)}
        self.table = torch.zeros(4)

    def get_extra_state(self):
        return {"uses": self.uses, "own": self.own, "table": self.table}

    def set_extra_state(self, state):
        self.uses, self.own, self.table = state["uses"], state["own"], state["table"]

    def forward(self, x):
        if self.training:
            self.uses += int(x.sum() * 1e3) if self.by_rows else 1
            self.table = self.table + 0.01
        past = float(self.own["past"].sum())
        return self.net(x * self.own["rate"] + self.uses * 0.01 + self.table.sum() + past)


def extra_state(ctx):
    model = nn.Sequential(Extra())
    for step in ctx.steps(model, adamw(model), cross_entropy):
        assert model[0].uses == step.number, "each virtual worker begins from the same state"
        model[0].own["rate"] *= 0.99
        model[0].own["past"][step.number % 3] += step.loss * 0.1
        uses = model[0].uses
        ctx.evaluate(cross_entropy, ctx.config["eval"])
        assert model[0].uses == uses
        hold(ctx, step)


def test_extra_state_of_modules_is_carried(tmp_path, monkeypatch):
    monkeypatch.setitem(BODY, "eval", MapStyleData(Points(30), micro_batch_size=8))
    check_carried(extra_state, tmp_path)


def test_extra_state_that_depends_on_the_rows_is_refused_by_name():
    def train(ctx):
        model = nn.Sequential(Extra(by_rows=True))
        loop(ctx, model, adamw(model))

    assert "extra state '0._extra_state' (get_extra_state) differs on virtual" in refusal(train)


def test_extra_state_that_cannot_be_carried_is_refused_by_name():
    def train(ctx):
        model = nn.Sequential(Extra())
        model[0].own["rule"] = lambda x: x
        loop(ctx, model, adamw(model))

    assert "get_extra_state of model.0 returns at own.rule a builtins.function" in refusal(train)
