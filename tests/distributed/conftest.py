"""Tests of this folder may put a simulated device in place of the CPU; the next one has the CPU."""

import pytest

from elastic_dp.device.accelerator import install


@pytest.fixture(autouse=True)
def _no_simulated_device_is_left():
    yield
    install(None)
