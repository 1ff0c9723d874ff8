"""What the host does in a step, and in one of a plain loop: on a GPU it launches operators one by
one, and a small model waits for it. Counted, so that no GPU and no quiet machine is needed."""

import os
import sys
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import elastic_dp
from benchmarks.models import GPT, RandomTokens, loss_fn
from elastic_dp.config import DataConfig, JobSpec, ScalingConfig
from elastic_dp.train.local_run import LocalRun
from elastic_dp.train.loop_guard import model_guard

OURS = os.path.dirname(elastic_dp.__file__)
OF_REDUCTION = os.path.join(OURS, "distributed")
COUNTED = 4  # the step: hooks are where they stay, the optimizer has its state


class Operators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.count += 1
        return operator(*args, **(kwargs or {}))


class Calls:
    """Counts the Python functions of this package that are called, by file, and notes the classes
    of the objects whose methods they are."""

    def __init__(self):
        self.of_file, self.classes = Counter(), set()

    def __enter__(self):
        sys.setprofile(self._note)

    def __exit__(self, *_):
        sys.setprofile(None)

    def _note(self, frame, event, argument):
        if event == "call" and frame.f_code.co_filename.startswith(OURS):
            self.of_file[frame.f_code.co_filename] += 1
            if "self" in frame.f_locals:
                self.classes.add(type(frame.f_locals["self"]))

    def of(self, folder):
        return sum(n for file, n in self.of_file.items() if file.startswith(folder))


def data():
    return RandomTokens(2, 17)


def step_of_ours(counter, *, exact=True, blocks=12, virtual=4):
    def train(ctx):
        torch.manual_seed(0)
        model = GPT(32, blocks)
        optimizer = torch.optim.AdamW(model.parameters())
        for step in ctx.steps(model, optimizer, loss_fn, clip_norm=1.0):
            if step.number == COUNTED - 1:
                counter.__enter__()
            elif step.number == COUNTED:
                counter.__exit__(None, None, None)

    spec = JobSpec(
        name="counted",
        data=DataConfig("none", micro_batch_size=2),
        scaling=ScalingConfig(max_workers=1, virtual_workers=virtual),
        exact=exact,
        max_steps=COUNTED + 1,
    )
    LocalRun(spec, data(), torch.device("cpu")).run(train)
    return counter


def operators_of_a_plain_step():
    torch.manual_seed(0)
    model, rows, operators = GPT(32, 12), data(), Operators()
    optimizer = torch.optim.AdamW(model.parameters())
    assert len([*model.parameters()]) == 149
    for step in range(COUNTED):
        operators.count = 0
        with operators:
            for v in range(4):
                loss = loss_fn(model, rows.batch(step, v)) / 4
                loss.backward()
                loss.detach().item()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return operators.count


@pytest.mark.parametrize("exact", [True, False])
def test_step_dispatches_hardly_more_operators_than_a_plain_loop(exact):
    ours = step_of_ours(Operators(), exact=exact).count
    assert ours <= 1.05 * operators_of_a_plain_step()


@pytest.mark.parametrize("exact", [True, False])
def test_summing_up_a_micro_batch_calls_few_functions_whatever_the_number_of_parameters(exact):
    four, eight, deep = (
        step_of_ours(Calls(), exact=exact, virtual=virtual, blocks=blocks)
        for virtual, blocks in ((4, 12), (8, 12), (4, 24))
    )
    assert (eight.of(OF_REDUCTION) - four.of(OF_REDUCTION)) / 4 <= 17
    assert (eight.of(OURS) - four.of(OURS)) / 4 <= 42  # 2 of them for the one bucket
    assert deep.of(OF_REDUCTION) == four.of(OF_REDUCTION)


def test_versions_of_parameters_are_read_as_often_whatever_the_number_of_micro_batches(monkeypatch):
    class Versions:
        def __enter__(self):
            self.read = 0
            monkeypatch.setattr(model_guard, "_version", self.of)

        def __exit__(self, *_):
            monkeypatch.undo()

        def of(self, p):
            self.read += 1
            return p._version

    def read(virtual):
        return step_of_ours(Versions(), virtual=virtual).read

    assert read(4) == read(8) == 4 * 149  # around the micro-batches, and around the body


def test_no_function_of_ours_is_called_once_a_parameter_in_a_step():
    few, many = (step_of_ours(Calls(), blocks=blocks) for blocks in (12, 24))
    assert many.of(OURS) - few.of(OURS) < 12  # of 144 parameters


def test_a_plain_step_runs_through_few_classes():
    """Seven are participants, which agree on something in each step."""
    assert len(step_of_ours(Calls()).classes) <= 40
