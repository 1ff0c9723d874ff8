"""Whole runs with rounded gradients (`wire="bf16"` and `wire="int8"`): one digest for any number of
workers, and after kills, joins and restarts."""

import dataclasses

import pytest
import torch

from elastic_dp.distributed.gradient_reducer import GradientReducer
from elastic_dp.errors import ModelError
from elastic_dp.sampling.seeds import rounding_seed
from tests.runs import local, spec_of
from tests.train.jobs import adamw, bf16_parameters, classifier, loop, plain


def test_each_step_and_seed_rounds_its_own_way(monkeypatch):
    """What is drawn for `wire="int8"`."""
    begun = []
    begin = GradientReducer.begin

    def recorded(self, seed=0, **options):
        begun.append(seed)
        begin(self, seed, **options)

    monkeypatch.setattr(GradientReducer, "begin", recorded)
    for seed in (0, 1):
        spec = spec_of(steps=3, wire="int8")
        local(dataclasses.replace(spec, data=dataclasses.replace(spec.data, seed=seed)), plain)
    assert begun == [rounding_seed(seed, step) for seed in (0, 1) for step in (1, 2, 3)]
    assert len(set(begun)) == 6


@pytest.mark.parametrize("wire", ["bf16", "int8"])
def test_model_in_bf16_has_nothing_to_round(wire):
    rounded = local(spec_of(steps=4, wire=wire), bf16_parameters)
    assert rounded.digest == local(spec_of(steps=4), bf16_parameters).digest


def test_model_in_fp64_is_refused_before_the_first_step():
    def train(ctx):
        model = classifier().to(torch.float64)
        loop(ctx, model, adamw(model))

    with pytest.raises(ModelError, match=r"model\.0\.weight is of torch\.float64, and wire='bf16'"):
        local(spec_of(steps=2, wire="bf16"), train)
