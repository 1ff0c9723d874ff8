"""A worker that trains for long keeps few data sets of evaluations. An evaluation leaves the model
as the body has it."""

import types

import pytest
import torch

from elastic_dp import DataConfig, MapStyleData
from elastic_dp.errors import LoopError
from elastic_dp.train import context
from tests.runs import Points, group, local, spec_of, texts_of
from tests.train.jobs import adamw, classifier, cross_entropy


def test_evaluation_data_that_a_body_makes_each_time_is_opened_once_and_little_of_it_is_kept(
    monkeypatch,
):
    opened = []

    def opens(data, **_):
        opened.append(data)
        return len(opened)

    monkeypatch.setattr("elastic_dp.data.open_evaluation", opens)
    session = types.SimpleNamespace(
        device=torch.device("cpu"), spec=spec_of(), link=types.SimpleNamespace(say=print)
    )
    made = context.TrainContext(session)
    found = {made._opened(DataConfig("there", micro_batch_size=4)) for _ in range(5)}
    assert found == {1} and len(opened) == 1
    kept = MapStyleData(Points(), micro_batch_size=4)
    assert [made._opened(kept) for _ in range(2)] == [2, 2]
    for _ in range(100):
        newest = MapStyleData(Points(), micro_batch_size=4)
        assert made._opened(newest) == len(opened)
    assert made._opened(newest) == 102 and len(made._evaluation_data) == context._EVALUATIONS_KEPT


def test_evaluation_does_not_undo_what_the_body_has_set():
    def train(ctx):
        model = classifier()
        model.warmth = 1.0
        for step in ctx.steps(model, adamw(model), lambda m, b: cross_entropy(m, b) * m.warmth):
            model.warmth = 0.9**step.number
            ctx.evaluate(cross_entropy, ctx.config["eval"])
            assert model.warmth == 0.9**step.number

    data = MapStyleData(Points(30), micro_batch_size=8)
    _, run = group(spec_of(steps=3, workers=1, config={"eval": data}), train)
    assert any("changes model.warmth (1.0, then 0.9)" in text for text in texts_of(run))


@pytest.mark.parametrize("after", [True, False])
def test_evaluation_keeps_buffers_written_after_the_loop_and_refuses_those_of_a_body(after):
    data = MapStyleData(Points(30), micro_batch_size=8)

    def train(ctx):
        model = torch.nn.Sequential(torch.nn.Linear(16, 4), torch.nn.BatchNorm1d(4))

        def write_and_evaluate():  # as torch.optim.swa_utils.update_bn does
            model[1].running_mean.fill_(7.0)
            ctx.evaluate(cross_entropy, data)
            assert model[1].running_mean.eq(7.0).all()

        for _ in ctx.steps(model, adamw(model), cross_entropy):
            if not after:
                write_and_evaluate()
        write_and_evaluate()

    if after:
        local(spec_of(steps=2), train)
    else:
        with pytest.raises(LoopError, match="running_mean"):
            local(spec_of(steps=2), train)
