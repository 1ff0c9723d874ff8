"""The Ray that modules share is closed before a test that needs another one, and at the end."""

import pytest

from tests.conftest import ON_ONE_RAY
from tests.ray import clusters


@pytest.fixture(scope="module", autouse=True)
def _shared_or_none(request):
    if not request.node.nodeid.startswith(ON_ONE_RAY):
        clusters.close_shared()


@pytest.fixture(scope="session", autouse=True)
def _none_at_the_end():
    yield
    clusters.close_shared()
    clusters.close_server()
