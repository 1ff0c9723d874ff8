"""Decisions, bits and names are those that were recorded. `python -m tests.behaviour --record`
records a change that is made on purpose."""

import pytest
import torch

from tests.behaviour.__main__ import ZOO, recorded, simulator_digest
from tests.behaviour.option_jobs import JOBS, of_one_process
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
    assert zoo_digest(name) == recorded_on_this_machine("weights", ZOO)[name]


def recorded_on_this_machine(part, names):
    stored = recorded()[part]
    if this_machine() not in stored:
        pytest.skip(f"recorded on other kinds of machines: {list(stored)}")
    assert set(stored[this_machine()]) == set(names)
    return stored[this_machine()]


@pytest.mark.parametrize("name", JOBS)
def test_job_with_options_has_the_recorded_weights_and_records(name, one_thread):
    assert of_one_process(name) == recorded_on_this_machine("options", JOBS)[name]


@pytest.mark.slow
def test_simulator_gives_the_recorded_commands():
    assert simulator_digest() == recorded()["simulator"]
