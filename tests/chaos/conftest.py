"""The undisturbed run, and what must be true after a disturbed one, for every case of chaos."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.cluster import ChaosRun, Cluster
from tests.chaos.hosts import folder
from tests.chaos.job import trainer

STEPS = 200
WHOLE_AT = {10: 3, 120: 3}  # the body of these steps waits for a group of three


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A parameter holds options of `Cluster`."""
    cluster = Cluster(Path(folder()), **getattr(request, "param", {}))
    yield cluster
    cluster.close()


@pytest.fixture(scope="session")
def calm(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list]:
    """The undisturbed run: its weights, and its metrics step by step."""
    folder = tmp_path_factory.mktemp("calm")
    result = trainer(str(folder), "calm", STEPS, body_s=0.0).fit(local=True)
    return result.weights_sha256, lines_of(ChaosRun(folder / "calm", None))


def start(cluster: Cluster, name: str, **options) -> ChaosRun:
    """`heartbeat_timeout_s`: a busy machine may keep somebody waiting who is not dead."""
    run = cluster.run(name, STEPS, hold=WHOLE_AT, heartbeat_timeout_s=6.0, **options)
    run.whole(members=3, step=20)
    return run


def check(run: ChaosRun, calm: tuple[str, list]) -> None:
    """Every step once, in order, on the same rows, to the same weights."""
    result = run.finished()
    assert (result["weights_sha256"], lines_of(run)) == calm
    assert result["exact"], result["inexact_because"]


def lines_of(run: ChaosRun) -> list[tuple]:
    return [(line["step"], line["loss"], line["ids"]) for line in run.lines("metrics")]
