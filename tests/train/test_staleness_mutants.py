"""Without any guard of delayed gradients, the test that is named for it fails."""

from __future__ import annotations

import pytest

from tests.module_mutants import ModuleMutant, check_noticed, check_stands
from tests.train.staleness_mutants import STALENESS_MUTANTS


@pytest.mark.parametrize("mutant", STALENESS_MUTANTS, ids=lambda mutant: mutant.name)
def test_guard_of_delayed_gradients_stands_where_its_mutant_says(mutant: ModuleMutant) -> None:
    check_stands(mutant)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", STALENESS_MUTANTS, ids=lambda mutant: mutant.name)
def test_missing_guard_of_delayed_gradients_is_noticed(mutant: ModuleMutant) -> None:
    named_by = {"STALENESS_MUTANT": mutant.name}
    check_noticed(mutant, "tests.train.staleness_mutants", named_by)
