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
# What few seeds show, or the last scenarios. Others like them are noticed in CI.
NOTICED_LATE = frozenset(
    {
        "a builder that is gone counts",
        "a death while forming counts as a failure to form",
        "a hand-over in which nothing moves is waited for",
        "a late planned end is ignored",
        "a lost claim is ignored",
        "a lost lineage stays lost",
        "a node that is being left is thinned like others",
        "a notice that was wrong ends each generation",
        "a replacement is asked for when its node is gone",
        "a report never establishes the lineage",
        "a slow worker is replaced though nobody is ready",
        "a stop is nobody's fault but its own",
        "a stopped worker resumes",
        "a subtree larger than the share stays",
        "a take-over renews the lease of any generation",
        "a word that was lost is not said again",
        "another that is slow inherits the time of the one before",
        "claims skip numbers",
        "commit without compare-and-swap",
        "for min_on_demand any node is kept",
        "for min_on_demand workers of a node that is being left are kept",
        "has state before the copy is complete",
        "identities before the claim",
        "identities start over after a take-over",
        "judged by a heartbeat behind which others wait",
        "late and doubled heartbeats count",
        "lease from the answer's arrival",
        "messages are no sign of life",
        "no initial source after a take-over",
        "no wait for the lease",
        "one for each look at a notice",
        "one half-way through a body keeps its state",
        "planned ends are not kept",
        "sleep is taken for their silence",
        "slow workers are replaced one after the other",
        "spot nodes are kept",
        "standbys on a node are overlooked",
        "stop of an older generation counts",
        "the body's state is handed to those behind",
        "the end of the run is held up",
        "the excused are judged after they left",
        "the least number holds up the end of the run",
        "the thawed are answered",
        "those who must go stay to the end",
        "those who wait in a collective are suspects",
        "what is asked for while nobody trains is forgotten",
        "what is told to stop may not finish its body",
        "what it ran is not heard after its death",
        "what was held is dropped",
        "who computes has no longer limit",
        "who drains is overlooked when places are given",
        "who drains is overlooked when standbys leave",
        "who hangs as a new controller asks is waited for",
        "who has time left is not counted",
        "who is at the end of the run has finished a step beyond it",
        "who may compile has no longer limit",
        "who was slow in an older generation is replaced",
        "written to before all has arrived",
    }
)
CONTROLS = [
    Mutant("unbroken coordinator", "Coordinator.handle", "self.deadline", "self.deadline"),
    Mutant("unbroken generation", "Generation.is_over", "self.run.in_flight", "self.run.in_flight"),
    Mutant("unbroken selection", "select_members", "chosen = set(taken)", "chosen = set(taken)"),
    Mutant("unbroken workers", "COLLECTIVES", "COLLECTIVES = 2", "COLLECTIVES = 2"),
]


def words(mutant: Mutant) -> object:
    in_a_scenario = None if home(mutant)[0] == WORKERS else caught_in_a_scenario(mutant)
    return in_a_scenario or caught(mutant, range(mutant.first, mutant.first + SEEDS))


def test_mutants_that_are_noticed_late_exist() -> None:
    assert {mutant.name for mutant in MUTANTS} >= NOTICED_LATE


@pytest.mark.parametrize(
    "mutant",
    [
        pytest.param(one, id=one.name, marks=pytest.mark.slow if one.name in NOTICED_LATE else ())
        for one in MUTANTS
    ],
)
def test_a_missing_guard_is_noticed(mutant: Mutant) -> None:
    assert words(mutant), f"nothing notices: {mutant.name}"


@pytest.mark.parametrize(
    "control",
    [
        pytest.param(one, id=one.name, marks=() if one is CONTROLS[0] else pytest.mark.slow)
        for one in CONTROLS
    ],
)
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
