"""Decisions, bits and names are those that were recorded. `python -m tests.behaviour --record`
records a change that is made on purpose."""

import pytest
import torch

from tests.behaviour.__main__ import ZOO, recorded, simulator_digest
from tests.behaviour.public_api import command_line, documented_names, public_api
from tests.behaviour.zoo_digests import this_machine, zoo_digest

QUICK = ("plain", "batch_norm", "autocast_bf16", "clipped_average_norm")


@pytest.fixture
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_public_api_has_the_recorded_parameters_and_defaults():
    assert len(documented_names()) > 15
    assert public_api() == recorded()["api"]


def test_command_line_has_the_recorded_options_and_defaults():
    assert command_line() == recorded()["command_line"]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in ZOO]
)
def test_zoo_model_has_the_recorded_weights(name, one_thread):
    stored = recorded()["weights"]
    assert set(stored["sha256"]) == set(ZOO)
    if stored["machine"] != this_machine():
        pytest.skip(f"recorded on another kind of machine: {stored['machine']}")
    assert zoo_digest(name) == stored["sha256"][name]


@pytest.mark.slow
def test_simulator_gives_the_recorded_commands():
    assert simulator_digest() == recorded()["simulator"]
