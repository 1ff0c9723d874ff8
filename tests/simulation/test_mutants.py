"""Every guard is needed: without it, a scenario of tests/coordinator fails, or a seed of the
simulator violates an invariant."""

import ast
from pathlib import Path

import pytest

from tests.simulation.mutants import (
    MUTANTS,
    WORKERS,
    Mutant,
    caught,
    caught_in_a_scenario,
    home,
    places,
)

SEEDS = 800
CONTROLS = [
    Mutant("unbroken coordinator", "Coordinator.handle", "self.deadline", "self.deadline"),
    Mutant("unbroken generation", "Generation.is_over", "self.run.in_flight", "self.run.in_flight"),
    Mutant("unbroken selection", "select_members", "chosen = set(taken)", "chosen = set(taken)"),
    Mutant("unbroken workers", "COLLECTIVES", "COLLECTIVES = 2", "COLLECTIVES = 2"),
]


def words(mutant: Mutant) -> object:
    in_a_scenario = None if home(mutant)[0] == WORKERS else caught_in_a_scenario(mutant)
    return in_a_scenario or caught(mutant, range(mutant.first, mutant.first + SEEDS))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_missing_guard_is_noticed(mutant: Mutant) -> None:
    assert words(mutant), f"nothing notices: {mutant.name}"


@pytest.mark.parametrize("control", CONTROLS, ids=lambda mutant: mutant.name)
def test_unbroken_control_passes(control: Mutant) -> None:
    """A mutant must be caught for the guard that it lacks, and not for the way it is made."""
    assert caught_in_a_scenario(control) is None
    assert caught(control, range(60)) is None


def test_a_mutant_fails_for_its_missing_guard_and_not_for_a_name_that_is_gone() -> None:
    known = set(dir(__builtins__) if not isinstance(__builtins__, dict) else __builtins__)
    for _, path in {place for found in places().values() for place in found}:
        known |= names(ast.parse(Path(path).read_text()))
    for mutant in MUTANTS:
        assert names(ast.parse(mutant.instead)) <= known, mutant.name


def names(tree: ast.AST) -> set[str]:
    nodes = list(ast.walk(tree))
    return (
        {node.id for node in nodes if isinstance(node, ast.Name)}
        | {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        | {node.arg for node in nodes if isinstance(node, ast.arg)}
        | {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        | {
            alias.asname or alias.name
            for node in nodes
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
        }
    )
