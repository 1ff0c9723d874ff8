"""What breaks exactness, or changes when a run is started again, is said by name."""

import warnings

import pytest
import torch
from torch import nn

from elastic_dp.errors import SpecError
from elastic_dp.train.exactness.machine_kind import DeterministicKernels
from elastic_dp.train.local_run import LocalRun
from tests.runs import local, spec_of
from tests.train.jobs import classify

CPU = torch.device("cpu")


def with_options(**options):
    def train(ctx):
        classify(ctx, **options)

    return train


@pytest.mark.parametrize(
    "options", [{"precision": "bf16"}, {"clip_norm": 0.3}, {"clip_value": 0.1}]
)
def test_option_of_the_loop_that_changes_at_a_restart_is_said_by_name(
    options, tmp_path, monkeypatch
):
    said = []
    monkeypatch.setattr(LocalRun, "say", lambda run, text: said.append(text))
    local(spec_of(steps=3), with_options(), url=str(tmp_path))
    assert not [text for text in said if "of ctx.steps" in text]
    local(spec_of(steps=5), with_options(**options), url=str(tmp_path))
    ((name, value),) = options.items()
    expected = f"{name}={value!r} of ctx.steps counts from step 4 on; it was None before"
    assert [text for text in said if expected in text]


def test_operation_without_a_deterministic_kernel_is_named_in_a_whole_sentence():
    because = []
    x = torch.randn(1, 1, 4, 4)
    values, indices = nn.MaxPool2d(2, return_indices=True)(x)
    with warnings.catch_warnings(), DeterministicKernels(True, because, CPU):
        nn.MaxUnpool2d(2)(values, indices)
    assert because == ["max_unpooling2d_forward_out does not have a deterministic implementation"]


def test_flags_of_torch_that_may_not_be_set_are_refused_by_name(monkeypatch):
    flags = torch.backends.disable_global_flags.__globals__
    monkeypatch.setitem(flags, "__allow_nonbracketed_mutation_flag", False)
    with pytest.raises(SpecError, match="disable_global_flags"):
        DeterministicKernels(True, [], CPU).__enter__()
    assert not torch.are_deterministic_algorithms_enabled()
