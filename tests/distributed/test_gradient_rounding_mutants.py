"""Without any guard of rounded gradients, the test that is named for it fails."""

from __future__ import annotations

import pytest

from tests.distributed.gradient_rounding_mutants import GRADIENT_ROUNDING_MUTANTS
from tests.module_mutants import ModuleMutant, check_noticed, check_stands


@pytest.mark.parametrize("mutant", GRADIENT_ROUNDING_MUTANTS, ids=lambda mutant: mutant.name)
def test_guard_of_rounded_gradients_stands_where_its_mutant_says(mutant: ModuleMutant) -> None:
    check_stands(mutant)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", GRADIENT_ROUNDING_MUTANTS, ids=lambda mutant: mutant.name)
def test_missing_guard_of_rounded_gradients_is_noticed(mutant: ModuleMutant) -> None:
    named_by = {"GRADIENT_ROUNDING_MUTANT": mutant.name}
    check_noticed(mutant, "tests.distributed.gradient_rounding_mutants", named_by)
