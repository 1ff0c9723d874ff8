"""Without any guard of workers of several processes, the test that is named for it fails."""

from __future__ import annotations

import pytest

from tests.module_mutants import ModuleMutant, check_noticed, check_stands
from tests.train.gang_mutants import GANG_MUTANTS


@pytest.mark.parametrize("mutant", GANG_MUTANTS, ids=lambda mutant: mutant.name)
def test_guard_of_gangs_stands_where_its_mutant_says(mutant: ModuleMutant) -> None:
    check_stands(mutant)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", GANG_MUTANTS, ids=lambda mutant: mutant.name)
def test_missing_guard_of_gangs_is_noticed(mutant: ModuleMutant) -> None:
    named_by = {"GANG_MUTANT": mutant.name}
    check_noticed(mutant, "tests.train.gang_mutants", named_by)
