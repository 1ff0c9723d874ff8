"""Without any guard of finished work, the test that is named for it fails."""

from __future__ import annotations

import pytest

from tests.module_mutants import ModuleMutant, check_noticed, check_stands
from tests.train.finished_work_mutants import FINISHED_WORK_MUTANTS


@pytest.mark.parametrize("mutant", FINISHED_WORK_MUTANTS, ids=lambda mutant: mutant.name)
def test_guard_of_finished_work_stands_where_its_mutant_says(mutant: ModuleMutant) -> None:
    check_stands(mutant)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", FINISHED_WORK_MUTANTS, ids=lambda mutant: mutant.name)
def test_missing_guard_of_finished_work_is_noticed(mutant: ModuleMutant) -> None:
    named_by = {"FINISHED_WORK_MUTANT": mutant.name}
    check_noticed(mutant, "tests.train.finished_work_mutants", named_by)
