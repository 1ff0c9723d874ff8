"""Without any guard of inner steps, the test that is named for it fails."""

from __future__ import annotations

import pytest

from tests.module_mutants import ModuleMutant, check_noticed, check_stands
from tests.train.inner_steps_mutants import INNER_STEPS_MUTANTS


@pytest.mark.parametrize("mutant", INNER_STEPS_MUTANTS, ids=lambda mutant: mutant.name)
def test_guard_of_inner_steps_stands_where_its_mutant_says(mutant: ModuleMutant) -> None:
    check_stands(mutant)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", INNER_STEPS_MUTANTS, ids=lambda mutant: mutant.name)
def test_missing_guard_of_inner_steps_is_noticed(mutant: ModuleMutant) -> None:
    named_by = {"INNER_STEPS_MUTANT": mutant.name}
    check_noticed(mutant, "tests.train.inner_steps_mutants", named_by)
