"""Runs one micro-batch of the first step twice and compares the results, before training.

Both runs start with the same weights, buffers, random numbers and rows. A difference therefore
comes from something that the code keeps to itself: a generator of its own, a counter, a clock, a
tensor that is not a buffer. Such a thing is not the same on a worker that joins, and changes as
often as that worker happens to run micro-batches. The job is refused, and the error names what
differs, with whatever else changed meanwhile, since that is usually the cause.

Three things are not refused. If kernels may be the reason (on a GPU, or if torch has named an
operation without a deterministic one), the run is not exact, and `Result.inexact_because` says so.
A number that changes each time without changing the result, such as a count of calls for a log,
gives a warning. So does a metric that differs each time, which may be the time that the micro-batch
took.

The worker that provides the initial state runs the probe instead of a warm-up; workers that join
run the code that it has tried. What shows only later (another branch after a thousand steps) cannot
be detected this way.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from elastic_dp.device.faults import suppress_errors_of_code
from elastic_dp.device.gpu import chooses_kernels_by_time, is_gpu
from elastic_dp.errors import DataError, LossError
from elastic_dp.train.exactness.facts import Facts, listed, with_values

if TYPE_CHECKING:
    from elastic_dp.train.step.trial_run import TrialRun

_NAMED = 5  # differences that a message names


@dataclass(frozen=True, slots=True)
class ProbeOutcome:
    """The outcome of one run of a micro-batch."""

    rows: Facts
    result: Facts  # loss, weight, gradients, buffers
    left: Facts  # parameters and hyper-parameters, which a loss function must not write
    kept: Facts  # whatever else the model and the loss function hold
    metrics: Facts = field(default_factory=dict)


def probe(
    runs: TrialRun,
    because: list[str],
    say: Callable[[str], None],
    tolerates: Callable[[], AbstractContextManager[None]] = suppress_errors_of_code,
) -> None:
    """Runs the probe. Raises DataError and LossError.

    `because` holds the reasons so far why the run is not exact; the probe adds to it. `tolerates`
    is what user code may raise meanwhile.
    """
    kernels = bool(because) or is_gpu(
        runs.device
    )  # kernels may be the reason for different results
    left: Facts = {}
    kept: Facts = {}
    first = second = None
    with tolerates():  # user code that raises here raises again in a step
        left, kept = runs.holds()
        first = runs.run_trial()
        second = runs.run_trial()
    for text in _settings_undone(runs.device) if runs.exact else ():
        because.append(text)
        say(f"WARNING: not exact: {text}")
    if first is None or second is None:
        return
    changing = _differences(first.kept, second.kept)
    error = _judge(left, first, second, _differences(kept, first.kept) or changing)
    if error is None:
        if metrics := _differences(first.metrics, second.metrics):
            say(
                f"WARNING: {_listed(metrics)} differs when one micro-batch is run twice, as the "
                "time of a clock does. All workers get the same value, but a step that is "
                "repeated has another one: log it in the loop's body, and let nothing depend on it"
            )
        if changing:
            say(
                f"WARNING: {_listed(changing)} changes with each micro-batch. A worker that joins "
                "or starts again begins with a value of its own, and how often it changes "
                "depends on the number of workers. If the loss depends on it, make it a buffer "
                "of the model, or an object that is passed as state= and changed in the loop's "
                "body"
            )
        return
    if not runs.exact:
        say(f"WARNING: {error}")
    elif kernels and _differences(first.result, second.result):
        because.append(
            f"one micro-batch, run twice, gave {_listed(_differences(first.result, second.result))}"
        )
        say(f"WARNING: not exact: {because[-1]}. If no kernel is the reason: {error}")
    else:
        raise error


def _settings_undone(device: torch.device) -> list[str]:
    """Returns the settings of exact runs that user code has reverted."""
    found = []
    if not torch.are_deterministic_algorithms_enabled():
        found.append("torch.use_deterministic_algorithms was turned off")
    if chooses_kernels_by_time(device):
        found.append("torch.backends.cudnn.benchmark was turned on")
    return found


def _judge(
    before: Facts, first: ProbeOutcome, second: ProbeOutcome, meanwhile: list[str]
) -> DataError | LossError | None:
    if rows := _differences(first.rows, second.rows):
        return DataError(
            f"data gave other values when one micro-batch was read twice: {_listed(rows)}. A "
            "step may be repeated by another worker: draw random numbers from Python's, NumPy's "
            "or torch's global generators, which are seeded for each micro-batch, or from the "
            "rng that DataConfig.transform receives"
        )
    if written := _differences(before, first.left) or _differences(first.left, second.left):
        return LossError(
            f"the loss function changed {_listed(written)}. It may run more than once for a "
            "step, and each worker runs it for its own micro-batches: change parameters by the "
            "optimizer, and its settings in the loop's body; set what depends on the first "
            "batch before the loop"
        )
    if results := _differences(first.result, second.result):
        cause = f" What changed meanwhile: {_listed(meanwhile)}." if meanwhile else ""
        return LossError(
            "one micro-batch of step 1, run twice from the same weights, rows and random "
            f"numbers, gave {_listed(results)}.{cause} The loss must depend on nothing else: draw "
            "from the global generators, which are seeded for each micro-batch, make what "
            "forward changes a buffer, pass what the loop's body changes as state=, and use no "
            "clock; if only its first call differs, call the model once before the loop; or "
            "train with exact=False"
        )
    return None


def _differences(one: Facts, other: Facts) -> list[str]:
    """Returns the names of what differs, with short values."""
    names = [name for name in one | other if one.get(name) != other.get(name)]
    return [with_values(name, one.get(name), other.get(name)) for name in names]


def _listed(names: list[str]) -> str:
    return listed(names, _NAMED)
