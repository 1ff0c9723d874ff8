"""For all tests: one S3 server, started when the first asks for it; and patience, as a machine may be loaded."""

import hypothesis
import pytest

from tests.storage.servers import moto_server

hypothesis.settings.register_profile("patient", deadline=None)
hypothesis.settings.load_profile("patient")


@pytest.fixture(scope="session")
def moto():
    """The endpoint of moto's server. Each test makes buckets of its own."""
    with moto_server() as endpoint:
        yield endpoint
