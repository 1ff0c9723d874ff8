"""For whole runs: who is ready joins at once, whatever a join has cost."""

import pytest


@pytest.fixture(autouse=True)
def _joins_are_free(monkeypatch):
    """Where changes are dear and many, joiners wait for ten times what one costs; on a busy machine that is minutes."""
    monkeypatch.setattr("elastic_dp.coordinator.resizing.MOST", 0.0)
