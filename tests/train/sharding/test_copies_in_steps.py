"""When a step sends the copies of pieces that lack a backup: before any gradient, on all members,
so that they are on their way while the members compute."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from elastic_dp.train.step.leaf_runner import FinishedNode, FinishedWork, LeafRunner, OnePass
from elastic_dp.train.step.participants import StepParticipant


@pytest.mark.parametrize(
    ("finished", "expected"),
    [
        ([], ["backward 0", "copies", "backward 1", "copies"]),
        ([0], ["finished 0", "copies", "backward 1", "copies"]),
        ([1], ["backward 0", "finished 1", "copies"]),
        ([0, 1], ["finished 0", "finished 1", "copies"]),
    ],
    ids=["none is finished", "the first", "the last", "both"],
)
def test_copies_are_sent_before_the_pass_that_sends_gradients(finished, expected):
    """A member that has finished its last leaf before the loss has no such pass. The last call is
    made in each case, and sends nothing that is sent already."""
    told: list[str] = []

    class Copies(StepParticipant):
        def send(self) -> None:
            told.append("copies")

    def forward(batch, step, v, expected):
        loss = torch.ones((), requires_grad=True)
        loss.register_hook(lambda _: told.append(f"backward {v}"))
        return loss * 1.0, SimpleNamespace()

    data = MagicMock(rows=lambda step, v: 1)
    gradients = MagicMock()
    gradients.add_finished.side_effect = lambda node, *_: told.append(f"finished {node[0]}")
    micro_batches = SimpleNamespace(
        batch=lambda step, v: {}, forward=forward, check_written=lambda: None
    )
    runner = LeafRunner(
        OnePass(micro_batches, data),
        data,
        MagicMock(),
        gradients,
        MagicMock(),
        SimpleNamespace(virtual_workers=lambda step: 2),
        *(MagicMock() for _ in range(3)),
        exact=True,
    )
    runner.begin(1, [Copies()])
    work = FinishedWork(nodes={(v, v + 1): FinishedNode([], {}, {}) for v in finished})
    runner.run(1, [(0, 2)], work, sends=True)
    assert told == expected
