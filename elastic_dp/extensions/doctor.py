"""The checks of `elastic-dp doctor`: this machine, all nodes of a Ray cluster, and a store.

On each node one actor without resources runs, so a busy cluster can be checked, too. Nodes reach
each other in a ring: the number of connections grows with the nodes and not with their pairs.
"""

from __future__ import annotations

import contextlib
import os
import platform
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

from elastic_dp.checkpoint.storage_probe import probe
from elastic_dp.errors import ElasticError, StorageError
from elastic_dp.storage import StorageURL, Store, redact_url
from elastic_dp.storage.json_files import path_in
from elastic_dp.threads import background

MINIMUM = {"torch": (2, 11), "ray": (2, 56), "pyarrow": (18, 0)}  # as pyproject.toml has it
PYTHON = ((3, 11), (3, 14))  # from the first one to below the second one
CLOCK_OFFSET_S, CLOCK_LIMIT_S = 1.0, 900.0  # object stores refuse requests that are signed later
SLOW_WRITE_S = 1.0  # of a few bytes; a commit takes several of them
_ANSWER_S = 120.0  # of a node; its first answer takes the start of a process
_CONNECT_S = 5.0


@dataclass(frozen=True)
class Check:
    """One line of the doctor. `where` is the node; "" is this machine or all nodes. With a warning
    a run works, but slowly; with a failure it does not work."""

    check: str
    level: Literal["ok", "warning", "fails"]
    text: str
    remedy: str = ""
    where: str = ""


@dataclass(frozen=True)
class NodeFacts:
    """What is installed on a machine."""

    python: str
    versions: Mapping[str, str]


def facts_of_this_machine() -> NodeFacts:
    versions = {}
    for name in ("elastic_dp", *MINIMUM):
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    return NodeFacts(platform.python_version(), versions)


def check_machine(facts: NodeFacts, where: str = "") -> Check:
    """Return the check of one machine by itself."""
    wrong = []
    if not PYTHON[0] <= _number(facts.python) < PYTHON[1]:
        wrong.append(f"Python {facts.python} is not 3.{PYTHON[0][1]} to 3.{PYTHON[1][1] - 1}")
    for name, least in MINIMUM.items():
        if name not in facts.versions:
            wrong.append(f"{name} is not installed")
        elif _number(facts.versions[name]) < least:
            words = ".".join(map(str, least))
            wrong.append(f"{name} {facts.versions[name]} is older than {words}")
    if wrong:
        remedy = "install the package again, in an environment of Python 3.11 to 3.13"
        return Check("versions", "fails", "; ".join(wrong), remedy, where)
    found = ", ".join(f"{name} {number}" for name, number in facts.versions.items())
    return Check("versions", "ok", f"Python {facts.python}, {found}", where=where)


def check_versions_equal(nodes: Mapping[str, NodeFacts]) -> Check:
    """Exact runs need the same versions everywhere."""
    kinds: dict[str, list[str]] = {}
    for where, facts in nodes.items():
        words = {"Python": ".".join(facts.python.split(".")[:2]), **facts.versions}
        kinds.setdefault(", ".join(f"{n} {v}" for n, v in words.items()), []).append(where)
    if len(kinds) == 1:
        return Check("same versions", "ok", f"all {len(nodes)} nodes have the same versions")
    text = "; ".join(f"{words} on {', '.join(where)}" for words, where in kinds.items())
    return Check("same versions", "fails", text, "use one image on all nodes")


def check_clock(where: str, offset_s: float, within_s: float) -> Check:
    """Judge the clock of a node, whose offset from this machine's is known `within_s`."""
    text = f"{offset_s:+.3f} s from this machine's clock, measured within {within_s:.3f} s"
    away, remedy = max(0.0, abs(offset_s) - within_s), "run an NTP client on every node"
    if away > CLOCK_LIMIT_S:
        text = f"{text}: object stores refuse signed requests"
        return Check("clock", "fails", text, remedy, where)
    if away > CLOCK_OFFSET_S:
        text = f"{text}: a node that goes away is left too early or too late"
        return Check("clock", "warning", text, remedy, where)
    return Check("clock", "ok", text, where=where)


def check_store(url: StorageURL, token: str) -> list[Check]:
    """Write below `doctor-TOKEN/` as a run does, create an object that is there, and delete it."""
    try:
        store = Store(StorageURL(f"{url.rstrip('/')}/doctor-{token}", url.options), timeout_s=30.0)
        began = time.monotonic()
        path = path_in(store, "written")
        store.write(path, b"x" * 100)
        took_s = time.monotonic() - began
        try:
            probe(store, token)
            once = Check("create-only writes", "ok", "an object is created once")
        except StorageError as error:
            remedy = "use a folder that all nodes share, or s3://, gs:// or az://"
            once = Check("create-only writes", "fails", str(error), remedy)
        finally:
            for entry in store.find(f"{store.path.rstrip('/')}/"):
                store.delete(entry.path)
            if (local := store.local_path(store.path)) is not None:
                for folder, _, _ in sorted(os.walk(local), reverse=True):
                    with contextlib.suppress(OSError):
                        os.rmdir(folder)
    except (ElasticError, OSError) as error:
        text = f"{redact_url(url)} cannot be used: {error}"
        remedy = "see that the path exists and that the credentials may write"
        return [Check("store", "fails", text, remedy)]
    text = f"a write of 100 bytes takes {1e3 * took_s:.0f} ms"
    if took_s > SLOW_WRITE_S:
        text = f"{text}; a commit takes several"
        return [Check("store", "warning", text, "use a store in the region of the nodes"), once]
    return [Check("store", "ok", text), once]


def check_cluster(storage: StorageURL | None, token: str) -> Iterator[Check]:
    """Check all nodes of the connected cluster. With `storage`, each node must see the same."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    remote = ray.remote(num_cpus=0, max_restarts=0)(_Node)
    nodes = {
        f"{node['NodeManagerAddress']} ({node['NodeID'][:6]})": node
        for node in ray.nodes()
        if node["Alive"]
    }
    actors: dict[str, Any] = {
        where: remote.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ).remote()
        for where, node in nodes.items()
    }

    def ask(method: str, arguments: Callable[[str], tuple[Any, ...]]) -> dict[str, Any]:
        asked = {w: getattr(actor, method).remote(*arguments(w)) for w, actor in actors.items()}
        return {where: ray.get(answer, timeout=_ANSWER_S) for where, answer in asked.items()}

    try:
        for where, actor in list(actors.items()):
            try:
                ray.get(actor.clock.remote(), timeout=_ANSWER_S)
            except ray.exceptions.RayError as error:
                text = f"no answer: {str(error).strip().splitlines()[-1]}"
                remedy = "install elastic_dp there, in the same version; look at Ray's logs"
                yield Check("node", "fails", text, remedy, where)
                ray.kill(actors.pop(where))
        facts = ask("facts", lambda where: ())
        for where, found in facts.items():
            yield check_machine(found, where)
            best = (float("inf"), 0.0)
            for _ in range(5):  # as NTP does: the answer that took least tells most
                sent = time.time()
                there = ray.get(actors[where].clock.remote(), timeout=_ANSWER_S)
                received = time.time()
                best = min(best, ((received - sent) / 2, there - (sent + received) / 2))
            yield check_clock(where, best[1], best[0])
        yield check_versions_equal(facts)
        ring, ports = list(actors), ask("listen", lambda where: ())
        following = dict(zip(ring, [*ring[1:], *ring[:1]], strict=True))
        for where, wrong in ask("reach", lambda where: ports[following[where]]).items():
            text = wrong or f"{where} reaches {following[where]}"
            remedy = "allow all TCP ports between the nodes of the cluster" if wrong else ""
            yield Check("network", "fails" if wrong else "ok", text, remedy)
        if storage is not None:
            yield from _same_storage(storage, token, ask)
    finally:
        for actor in actors.values():
            ray.kill(actor)


class _Node:
    """The actor of one node."""

    def facts(self) -> NodeFacts:
        return facts_of_this_machine()

    def clock(self) -> float:
        return time.time()

    def listen(self) -> tuple[str, int]:
        """Open a port, and return it with this address."""
        import ray

        host = ray.util.get_node_ip_address()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._server = socket.create_server((host, 0), family=family)
        background("doctor", self._accept).start()
        return host, self._server.getsockname()[1]

    def reach(self, host: str, port: int) -> str:
        """Return why the port cannot be reached, or nothing."""
        try:
            socket.create_connection((host, port), _CONNECT_S).close()
        except OSError as error:
            return f"{host}:{port} is not reached: {error}"
        return ""

    def read(self, url: StorageURL, name: str) -> str:
        try:
            store = Store(url, timeout_s=30.0)
            return bytes(store.read_all(path_in(store, name))).decode()
        except (ElasticError, OSError) as error:
            return f"{type(error).__name__}: {error}"

    def _accept(self) -> None:
        while True:
            self._server.accept()[0].close()


def _same_storage(storage: StorageURL, token: str, ask: Any) -> Iterator[Check]:
    """Each node reads what this machine has written."""
    store, name = Store(storage), f"doctor-{token}.txt"
    store.write(path_in(store, name), token.encode())
    try:
        found = ask("read", lambda where: (storage, name))
    finally:
        store.delete(path_in(store, name))
    for where, text in found.items():
        if text == token:
            yield Check("shared storage", "ok", "it sees what this machine writes", where=where)
        else:
            remedy = "use a folder that all nodes mount, or an object store; the same credentials"
            yield Check("shared storage", "fails", f"it does not see it: {text}", remedy, where)


def _number(text: str) -> tuple[int, int]:
    major, minor = text.split(".")[:2]
    return int(major), int("".join(c for c in minor if c.isdigit()) or 0)
