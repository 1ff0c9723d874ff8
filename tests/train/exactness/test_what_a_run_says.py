"""What breaks exactness, or changes when a run is started again, is said by name."""

import warnings
from functools import partial

import pytest
import torch
from torch import nn

from elastic_dp.errors import SpecError
from elastic_dp.train.exactness.machine_kind import DeterministicKernels
from tests.runs import local, spec_of
from tests.train.jobs import classify

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "options", [{"precision": "bf16"}, {"clip_norm": 0.3}, {"clip_value": 0.1}]
)
def test_option_of_the_loop_that_changes_at_a_restart_is_said_by_name(options, tmp_path):
    said = []
    local(spec_of(steps=3), classify, str(tmp_path), said.append)
    assert not [text for text in said if "of ctx.steps" in text]
    local(spec_of(steps=5), partial(classify, **options), str(tmp_path), said.append)
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
