"""Workers whose processes are on two nodes each, on a real Ray: whatever dies, the run goes on from
where it was, with the weights of one undisturbed worker, and no node stays reserved."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray.util import placement_group_table

import elastic_dp as edp
from tests.patience import eventually
from tests.processes import lives
from tests.ray import clusters
from tests.ray.jobs import FOR_EVER, is_whole, members, pid_of_controller, pids_of, wait_for
from tests.ray.test_gangs_on_ray import gangs
from tests.runs import scaled

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Any:
    with clusters.nodes(0, minimal=False) as made:
        for _ in range(4):
            made.add_node(num_cpus=1)
        yield made


def over_nodes(path: Path, name: str, workers: int, nodes: int = 2, **options: Any) -> Any:
    made = gangs(path, name, workers, pids=str(path), **options)
    sizes = {"nodes_per_worker": nodes, "processes_per_worker": nodes}
    made.spec = scaled(made.spec, **sizes, resources_per_worker={"CPU": nodes})
    return made


def processes(path: Path) -> set[int]:
    """Return those that have trained and live."""
    return {pid for file in path.iterdir() if file.name.isdigit() and lives(pid := int(file.name))}


def follower_of(first: int, path: Path) -> int:
    """Return the process on another node that is connected with this first process."""
    ours = {one.laddr.port for one in psutil.Process(first).net_connections("tcp")}
    [found] = [
        pid
        for pid in processes(path) - {first}
        if b"followers" in Path(f"/proc/{pid}/cmdline").read_bytes()
        and ours & {c.raddr.port for c in psutil.Process(pid).net_connections("tcp") if c.raddr}
    ]
    return found


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def reserved() -> list[str]:
    return [t["name"] for t in placement_group_table().values() if t["state"] != "REMOVED"]


def all_is_free() -> None:
    def free() -> bool:
        return reserved() == [] and ray.available_resources().get("CPU") == 4

    eventually(free, lambda: (reserved(), ray.available_resources()))


def host_actor_dies(run: edp.Run, worker: str, first: int, other: int) -> None:
    os.kill(parent_of(other), signal.SIGKILL)


def other_process_freezes_and_the_first_dies(
    run: edp.Run, worker: str, first: int, other: int
) -> None:
    os.kill(other, signal.SIGSTOP)
    os.kill(first, signal.SIGKILL)


def worker_is_killed(run: edp.Run, worker: str, first: int, other: int) -> None:
    run.kill(worker)


def worker_drains(run: edp.Run, worker: str, first: int, other: int) -> None:
    run.drain(worker, within_s=2.0)  # there is no room for another one before


FAULTS: list[Callable[..., None]] = [
    *(host_actor_dies, other_process_freezes_and_the_first_dies, worker_is_killed),
    worker_drains,
]


def test_gang_that_ends_costs_itself_alone_and_leaves_nothing(cluster: Any, tmp_path: Path) -> None:
    run = over_nodes(tmp_path, "ends", 2, steps=FOR_EVER, body_s=0.2).start()
    wait_for(run, lambda s: is_whole(s, 2))
    for fault in FAULTS:
        whole = wait_for(run, lambda s: is_whole(s, 2))
        victim = max(members(whole))
        first = pids_of(run, [victim])[victim]
        other = follower_of(first, tmp_path)
        fault(run, victim, first, other)
        again = wait_for(
            run, lambda s, victim=victim: is_whole(s, 2) and victim not in s["workers"]
        )
        wait_for(run, lambda s, again=again: s["step"] >= again["step"] + 3)
        eventually(lambda pair=(first, other): not any(map(lives, pair)), fault.__name__)
        assert len(reserved()) == 2, fault.__name__
    # A controller that takes over keeps the nodes of those that train, and frees the others.
    os.kill(pid_of_controller("ends"), signal.SIGKILL)
    at = wait_for(run, lambda s: is_whole(s, 2))["step"]
    wait_for(run, lambda s: s["step"] >= at + 3)
    assert len(reserved()) == 2
    node = cluster.add_node(num_cpus=1)
    lost = cluster.list_all_nodes()[-2]
    cluster.remove_node(lost, allow_graceful=False)
    wait_for(run, lambda s: s["world_size"] == 1)
    wait_for(run, lambda s: is_whole(s, 2))
    run.stop("enough")
    result = run.result()
    all_is_free()
    assert node in cluster.list_all_nodes()
    eventually(lambda: not processes(tmp_path))
    calm = gangs(tmp_path, "calm", 1, steps=result.step).fit()
    assert (result.exact, result.weights_sha256) == (True, calm.weights_sha256)


def test_nothing_stays_reserved_where_controller_and_first_process_are_gone(
    tmp_path: Path,
) -> None:
    run = over_nodes(tmp_path, "gone", 1, steps=FOR_EVER, body_s=0.2).start()
    whole = wait_for(run, lambda s: is_whole(s, 1))
    pids = pids_of(run, members(whole))
    ray.kill(run.controller, no_restart=True)
    os.kill(*pids.values(), signal.SIGKILL)
    all_is_free()
    eventually(lambda: not processes(tmp_path))


def test_worker_that_needs_more_nodes_than_there_are_waits_and_says_so(tmp_path: Path) -> None:
    run = over_nodes(tmp_path, "many", 1, nodes=5, steps=3).start()
    said = eventually(lambda: run.status()["waits_for"])
    assert "needs 5 nodes with {'CPU': 1.0} each, and this cluster has 4 such nodes" in said
    run.stop("enough")
    all_is_free()
