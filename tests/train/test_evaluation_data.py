"""A worker that trains for long keeps few data sets of evaluations."""

import types

import torch

from elastic_dp import DataConfig, MapStyleData
from elastic_dp.train import context
from tests.runs import Points, spec_of


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
