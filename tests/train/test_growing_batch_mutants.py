"""Without any guard of a batch that grows, the test that is named for it fails."""

from __future__ import annotations

import pytest

from tests.module_mutants import ModuleMutant, check_noticed, check_stands
from tests.train.growing_batch_mutants import GROWING_BATCH_MUTANTS


@pytest.mark.parametrize("mutant", GROWING_BATCH_MUTANTS, ids=lambda mutant: mutant.name)
def test_guard_of_growing_batches_stands_where_its_mutant_says(mutant: ModuleMutant) -> None:
    check_stands(mutant)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", GROWING_BATCH_MUTANTS, ids=lambda mutant: mutant.name)
def test_missing_guard_of_growing_batches_is_noticed(mutant: ModuleMutant) -> None:
    named_by = {"GROWING_BATCH_MUTANT": mutant.name}
    check_noticed(mutant, "tests.train.growing_batch_mutants", named_by)
