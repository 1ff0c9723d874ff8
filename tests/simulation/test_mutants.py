"""Every guard is needed: without it, a scene of tests/protocol fails or a seed of the simulator objects."""

import pytest

from tests.simulation.mutants import MUTANTS, WORKERS, Mutant, caught, caught_in_a_scene, home

SEEDS = 800
CONTROLS = [
    Mutant("unbroken coordinator", "Coordinator.handle", "self.deadline", "self.deadline"),
    Mutant("unbroken generation", "Generation.is_over", "self.run.in_flight", "self.run.in_flight"),
    Mutant("unbroken seating", "choose", "chosen = set(seated)", "chosen = set(seated)"),
    Mutant("unbroken workers", "COLLECTIVES", "COLLECTIVES = 2", "COLLECTIVES = 2"),
]


def words(mutant: Mutant) -> object:
    in_a_scene = None if home(mutant)[0] == WORKERS else caught_in_a_scene(mutant)
    return in_a_scene or caught(mutant, range(mutant.first, mutant.first + SEEDS))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_missing_guard_is_noticed(mutant: Mutant) -> None:
    assert words(mutant), f"nothing notices: {mutant.name}"


@pytest.mark.parametrize("control", CONTROLS, ids=lambda mutant: mutant.name)
def test_what_is_not_broken_passes(control: Mutant) -> None:
    """Else a mutant may be caught by the way it is made, and not for what it lacks."""
    assert caught_in_a_scene(control) is None
    assert caught(control, range(60)) is None
