"""Without any guard of the device path, the test that is named for it fails."""

from __future__ import annotations

import pytest

from tests.device.device_mutants import DEVICE_MUTANTS
from tests.module_mutants import ModuleMutant, check_noticed, check_stands


@pytest.mark.parametrize("mutant", DEVICE_MUTANTS, ids=lambda mutant: mutant.name)
def test_guard_of_the_device_path_stands_where_its_mutant_says(mutant: ModuleMutant) -> None:
    check_stands(mutant)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", DEVICE_MUTANTS, ids=lambda mutant: mutant.name)
def test_missing_guard_of_the_device_path_is_noticed(mutant: ModuleMutant) -> None:
    check_noticed(mutant, "tests.device.device_mutants", {"DEVICE_MUTANT": mutant.name})
