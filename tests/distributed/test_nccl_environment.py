"""Torch's NCCL process group ends or blocks no worker that survives: in the environment of real
workers."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from elastic_dp.distributed.nccl_environment import (
    DEFAULTS,
    REQUIRED,
    set_default_environment,
    set_nccl_environment,
)
from tests.runs import group, spec_of, texts_of
from tests.train.jobs import adamw, classifier, cross_entropy

HEADERS = Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d"


@pytest.mark.skipif(not HEADERS.is_dir(), reason="this build of torch has no headers")
def test_nccl_variables_are_known_to_the_installed_torch():
    known = "".join(
        (HEADERS / f).read_text() for f in ("ProcessGroupNCCL.hpp", "FlightRecorder.hpp")
    )
    unknown = {name for name in REQUIRED | DEFAULTS if f'"{name}"' not in known}
    newer = {"TORCH_NCCL_TEARDOWN_ON_TIMEOUT"}  # from 2.15 on
    assert unknown in (set(), newer)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, []),
        ({"TORCH_FR_BUFFER_SIZE": "2000"}, []),  # a flight recorder that the user asked for
        # Values that end survivors.
        *(({name: "1"}, [f"{name}=1 is overridden with 0"]) for name in sorted(REQUIRED)),
    ],
)
def test_set_nccl_environment_overrides_what_ends_survivors_and_says_so(given, said):
    environment = dict(given)
    assert [text.partition(":")[0] for text in set_nccl_environment(environment)] == said
    assert environment == DEFAULTS | given | REQUIRED
    assert set_nccl_environment(environment) == []


def test_set_nccl_environment_with_debug_detail_lowers_it_also_where_torch_has_read_it(monkeypatch):
    level = dist.get_debug_level()
    environment = {"TORCH_DISTRIBUTED_DEBUG": "detail"}
    try:
        dist.set_debug_level(dist.DebugLevel.DETAIL)
        assert "TORCH_DISTRIBUTED_DEBUG=detail" in set_nccl_environment(environment)[0]
        assert dist.get_debug_level() == dist.DebugLevel.INFO
    finally:
        dist.set_debug_level(level)
    assert environment["TORCH_DISTRIBUTED_DEBUG"] == "INFO"


def test_set_default_environment_changes_nothing_that_the_user_has_set():
    environment = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"}
    set_default_environment(environment)
    assert environment["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3"
    assert environment["TORCH_NCCL_ENABLE_MONITORING"] == "0"


def writes_its_environment(ctx):
    with open(ctx.config["file"], "w") as file:
        file.write("\n".join(f"{name}={os.environ.get(name)}" for name in REQUIRED | DEFAULTS))
    model = classifier()
    for _ in ctx.steps(model, adamw(model), cross_entropy):
        pass


def test_a_process_worker_has_the_nccl_environment(tmp_path):
    file = tmp_path / "environment"
    spec = spec_of(workers=1, steps=1, config={"file": str(file)})
    _, run = group(spec, writes_its_environment)
    assert file.read_text().splitlines() == [f"{n}={v}" for n, v in (REQUIRED | DEFAULTS).items()]
    assert not [text for text in texts_of(run) if "overridden" in text]
