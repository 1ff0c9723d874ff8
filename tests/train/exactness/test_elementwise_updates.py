"""An optimizer that runs on pieces gives the bits of one that runs on whole parameters, or its
parameters stay whole: with clipping by the norm over units, for any number of owners."""

import hashlib

import pytest
import torch

from elastic_dp.distributed.gradient_norm import fold_squares, squares_of_units
from elastic_dp.distributed.gradient_units import UnitLayout, elements_per_unit
from elastic_dp.train.exactness.elementwise_updates import (
    ELEMENTWISE,
    parameters_to_keep_whole,
    updates_equal_in_pieces,
)

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]
FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
OPTIONS = {torch.optim.SGD: {"momentum": 0.9, "weight_decay": 0.01}}
IMPLEMENTATIONS = [
    (kind, OPTIONS.get(kind, {}) | extra)
    for kind in sorted(ELEMENTWISE, key=lambda kind: kind.__name__)
    for extra in (
        {"foreach": False},
        {"foreach": True},
        *([{"foreach": None, "fused": True}] if kind in FUSED else []),
    )
]
QUICK = [
    (torch.optim.AdamW, {"foreach": False}, torch.float32),
    (torch.optim.AdamW, {"foreach": True}, torch.bfloat16),
    (torch.optim.AdamW, {"fused": True}, torch.float32),
    (torch.optim.SGD, {"fused": True, "momentum": 0.9}, torch.bfloat16),
]


def digest(kind, options, dtype, owners):
    """The digest after three clipped steps in which each owner updates its units alone."""
    make = torch.Generator().manual_seed(1)
    numels = (elements_per_unit(dtype) + 64 * 7 + 33, 500, 4097, 1)
    parameters = [torch.nn.Parameter(torch.randn(n, generator=make).to(dtype) / 8) for n in numels]
    layout = UnitLayout.of(parameters)
    whole = set(range(len(numels)))
    if owners > 1:
        whole = parameters_to_keep_whole(kind(parameters, **options), parameters)
    together = []  # units that have one owner
    for number in range(len(numels)):
        owned = layout.of_parameter(number)
        together += [owned] if number in whole else [range(unit, unit + 1) for unit in owned]
    units = [
        torch.nn.Parameter(torch.cat([layout.pieces(parameters)[i].detach() for i in owned]))
        for owned in together
    ]
    optimizers = [
        kind(mine, **options) for owner in range(owners) if (mine := units[owner::owners])
    ]
    for _ in range(3):
        pieces = layout.pieces([torch.randn(n, generator=make).to(dtype) for n in numels])
        squares = torch.zeros(len(pieces), dtype=torch.float64)
        for owner in range(owners):
            mine = {i for owned in together[owner::owners] for i in owned}
            squares += squares_of_units([p if i in mine else None for i, p in enumerate(pieces)])
        for unit, owned in zip(units, together, strict=True):
            unit.grad = torch.cat([pieces[i] for i in owned])
        torch.nn.utils.clip_grads_with_norm_(units, 1.0, fold_squares(squares).sqrt().float())
        for optimizer in optimizers:
            optimizer.step()
    flat = torch.cat([unit.detach() for unit in units])
    return hashlib.sha256(flat.view(torch.uint8).numpy().tobytes()).hexdigest()


def check_owners(kind, options, dtype, owners):
    assert len({digest(kind, options, dtype, n) for n in owners}) == 1


@pytest.mark.parametrize(("kind", "options", "dtype"), QUICK)
def test_clipped_updates_by_one_and_three_owners_have_equal_bits(kind, options, dtype):
    check_owners(kind, options, dtype, (1, 3))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kind", "options"), IMPLEMENTATIONS)
def test_clipped_updates_by_any_number_of_owners_have_equal_bits(kind, options, dtype):
    check_owners(kind, options, dtype, range(1, 9))


def test_probe_cuts_adamw_in_fp32():
    assert updates_equal_in_pieces(torch.optim.AdamW, {"lr": 0.01}, torch.float32, CPU)


def test_probe_keeps_a_parameter_whole_whose_last_elements_round_otherwise(monkeypatch):
    """A vectorized kernel does so whose scalar tail rounds in another way."""

    class Tail(torch.optim.SGD):
        @torch.no_grad()
        def step(self):
            super().step()
            for p in self.param_groups[0]["params"]:
                p[-1:].mul_(1 + 2**-22)

    module = "elastic_dp.train.exactness.elementwise_updates.ELEMENTWISE"
    monkeypatch.setattr(module, frozenset({Tail}))
    assert not updates_equal_in_pieces(Tail, {"lr": 0.1}, torch.float32, CPU)


def test_probe_sees_state_that_differs_while_the_parameter_does_not(monkeypatch):
    class Count(torch.optim.SGD):
        @torch.no_grad()
        def step(self):
            for p in self.param_groups[0]["params"]:
                self.state[p]["mean"] = p.grad.mean().expand_as(p).clone()

    module = "elastic_dp.train.exactness.elementwise_updates.ELEMENTWISE"
    monkeypatch.setattr(module, frozenset({Count}))
    assert not updates_equal_in_pieces(Count, {"lr": 0.1}, torch.float32, CPU)


class Subclass(torch.optim.AdamW):
    pass


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, torch.optim.Muon, Subclass])
def test_optimizer_not_known_to_be_elementwise_keeps_all_parameters_whole(kind):
    parameters = [torch.nn.Parameter(torch.ones(4, 4)) for _ in range(3)]
    assert parameters_to_keep_whole(kind(parameters[1:]), parameters) == {1, 2}


def test_probe_leaves_optimizer_parameters_and_random_state_as_they_are():
    parameters = [torch.nn.Parameter(torch.ones(4))]
    optimizer, before = torch.optim.Adam(parameters, lr=0.1), torch.get_rng_state()
    assert parameters_to_keep_whole(optimizer, parameters) == set()
    assert not optimizer.state and torch.equal(parameters[0].detach(), torch.ones(4))
    assert torch.equal(torch.get_rng_state(), before)
