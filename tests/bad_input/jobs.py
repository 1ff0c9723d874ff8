"""What the tests of bad input share: a job without a mistake, and loops with one."""

import pytest
from torch import nn

import elastic_dp as edp
from tests.runs import Points, local, spec_of
from tests.train.jobs import adamw, classifier, cross_entropy


class _Huge(int):
    """Beyond the largest float."""

    def __repr__(self):
        return "huge"

    __str__ = __repr__


HUGE = _Huge(10**400)


def trainer(tmp_path, train, rows=192, **options):
    options.setdefault("max_steps", 4)
    return edp.ElasticTrainer(
        train,
        name="bad",
        storage_path=str(tmp_path),
        data=edp.MapStyleData(Points(rows), micro_batch_size=4),
        scaling=edp.ScalingConfig(max_workers=2, virtual_workers=2),
        **options,
    )


def good(ctx):
    model = classifier()
    for _ in ctx.steps(model, adamw(model), cross_entropy):
        pass


def fails(
    kind,
    words,
    loss_fn=cross_entropy,
    model=classifier,
    body=None,
    optimizer=adamw,
    scheduler=lambda o: None,
    **options,
):
    def train(ctx):
        m = model()
        o = optimizer(m)
        for step in ctx.steps(m, o, loss_fn, scheduler=scheduler(o), **options):
            if body is not None and body(m, step, ctx) == "break":
                break

    with pytest.raises(kind) as caught:
        local(spec_of(), train)
    for word in words:
        assert word in str(caught.value), caught.value


def looping(loss_fn=cross_entropy, model=classifier, body=lambda step: False):
    """A train function whose loop breaks where `body` says so."""

    def train(ctx):
        m = model()
        for step in ctx.steps(m, adamw(m), loss_fn):
            if body(step):
                break

    return train


def not_finite(m, b):
    loss = cross_entropy(m, b)
    return loss * float("nan") if 17 in b["i"] else loss


def synchronised():
    return nn.Sequential(nn.Linear(16, 8), nn.SyncBatchNorm(8), nn.Linear(8, 4))
