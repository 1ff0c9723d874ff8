"""Asks all nodes of a Ray cluster what they are like, what their clocks say, and whom they reach.

On each node one actor without resources runs, so that a busy cluster can be asked, too. It imports
this package: a node that lacks it is reported. Nodes reach each other in a ring, so the number of
connections grows with the nodes and not with their pairs.
"""

from __future__ import annotations

import dataclasses
import socket
import time
from collections.abc import Mapping
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from elastic_dp.cluster.doctor.check_result import CheckResult, fails, ok
from elastic_dp.cluster.doctor.node_checks import check_clock, check_machine, check_together
from elastic_dp.cluster.doctor.node_facts import NodeFacts, facts_of_this_machine
from elastic_dp.cluster.doctor.store_check import read_by_another
from elastic_dp.errors import ElasticError
from elastic_dp.storage import StorageURL, Store
from elastic_dp.storage.json_files import path_in
from elastic_dp.threads import background

_ANSWER_S = 120.0  # of a node; its first answer takes the start of a process
_CLOCK_ASKS = 5
_CONNECT_S = 5.0
_SETTINGS = ("health_check_period_ms", "health_check_timeout_ms", "health_check_failure_threshold")


def check_cluster(storage: StorageURL | None, token: str) -> list[CheckResult]:
    """Return the checks of all nodes of the connected cluster. With `storage`, each node must see
    the same storage path.
    """
    nodes = [node for node in ray.nodes() if node["Alive"]]
    actors = {_name(node): _start(node) for node in nodes}
    try:
        facts, results = _ask_facts(actors)
        for where, one in facts.items():
            results += check_machine(one, where)
            results.append(_clock(where, actors[where]))
        results += check_together(facts)
        results += _reach({where: actors[where] for where in facts})
        if storage is not None:
            results += _same_storage({where: actors[where] for where in facts}, storage, token)
        return results
    finally:
        for actor in actors.values():
            ray.kill(actor)


@ray.remote(num_cpus=0, max_restarts=0)
class NodeProbe:
    """Runs on one node."""

    def facts(self, is_head: bool, gpus: float) -> NodeFacts:
        from ray._raylet import Config  # type: ignore[attr-defined]

        period_ms, timeout_ms, failures = (getattr(Config, name)() for name in _SETTINGS)
        return dataclasses.replace(
            facts_of_this_machine(ray.util.get_node_ip_address()),
            health_check=(period_ms / 1e3, timeout_ms / 1e3, int(failures)),
            head=is_head,
            gpus_of_ray=gpus,
        )

    def clock(self) -> float:
        return time.time()

    def listen(self) -> tuple[str, int, int]:
        """Open a port for TCP and one for UDP that echo, and return them with this address."""
        host = ray.util.get_node_ip_address()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._tcp = socket.create_server((host, 0), family=family)
        self._udp = socket.socket(family, socket.SOCK_DGRAM)
        self._udp.bind((host, 0))
        background("doctor-tcp", self._accept).start()
        background("doctor-udp", self._echo).start()
        return host, self._tcp.getsockname()[1], self._udp.getsockname()[1]

    def reach(self, host: str, tcp: int, udp: int) -> list[str]:
        """Return what cannot be reached there, with the error."""
        errors = []
        try:
            socket.create_connection((host, tcp), _CONNECT_S).close()
        except OSError as error:
            errors.append(f"TCP: {error}")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as client:
            client.settimeout(_CONNECT_S / 5)
            try:
                client.connect((host, udp))
                _echoes(client)
            except OSError as error:
                errors.append(f"UDP: {error}")
        return errors

    def read(self, url: StorageURL, path: str) -> str:
        try:
            return read_by_another(url, path)
        except (ElasticError, OSError) as error:
            return f"{type(error).__name__}: {error}"

    def _accept(self) -> None:
        while True:
            self._tcp.accept()[0].close()

    def _echo(self) -> None:
        while True:
            content, sender = self._udp.recvfrom(64)
            self._udp.sendto(content, sender)


# ---------------------------------------------------------------------------------- private


def _echoes(client: socket.socket, tries: int = 5) -> None:
    """A datagram may be lost; several in a row are not, unless something drops them."""
    for attempt in range(tries):
        try:
            client.send(b"doctor")
            client.recv(64)
            return
        except TimeoutError:
            if attempt == tries - 1:
                raise


def _name(node: Mapping[str, Any]) -> str:
    return f"{node['NodeManagerAddress']} ({node['NodeID'][:6]})"


def _start(node: Mapping[str, Any]) -> Any:
    strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
    return NodeProbe.options(scheduling_strategy=strategy).remote()  # type: ignore[attr-defined]


def _ask_facts(actors: Mapping[str, Any]) -> tuple[dict[str, NodeFacts], list[CheckResult]]:
    """Return the facts of the nodes that answer, and a result for each one that does not."""
    by_name = {_name(node): node for node in ray.nodes()}
    asked = {}
    for where, actor in actors.items():
        resources = by_name[where]["Resources"]
        is_head = "node:__internal_head__" in resources
        asked[where] = actor.facts.remote(is_head, resources.get("GPU", 0.0))
    facts, results = {}, []
    until = time.monotonic() + _ANSWER_S
    for where, answer in asked.items():
        try:
            facts[where] = ray.get(answer, timeout=max(0.0, until - time.monotonic()))
        except ray.exceptions.RayError as error:
            text = f"no answer: {str(error).strip().splitlines()[-1]}"
            way_out = (
                "install elastic_dp on the node, in the same version; look at Ray's logs there"
            )
            results.append(fails("node", text, way_out, where))
    return facts, results


def _clock(where: str, actor: Any) -> CheckResult:
    """Compare clocks as NTP does: the answer that took least tells most."""
    best = (float("inf"), 0.0)
    for _ in range(_CLOCK_ASKS):
        sent = time.time()
        there = ray.get(actor.clock.remote(), timeout=_ANSWER_S)
        received = time.time()
        best = min(best, ((received - sent) / 2, there - (sent + received) / 2))
    within_s, offset_s = best
    return check_clock(where, offset_s, within_s)


def _reach(actors: Mapping[str, Any]) -> list[CheckResult]:
    """Each node reaches the next one, in a ring; of a single node, itself."""
    names = list(actors)
    ports = dict(
        zip(names, ray.get([actors[n].listen.remote() for n in names], timeout=60.0), strict=True)
    )
    pairs = [(name, names[(at + 1) % len(names)]) for at, name in enumerate(names)]
    answers = [actors[source].reach.remote(*ports[target]) for source, target in pairs]
    results = []
    for (source, target), errors in zip(pairs, ray.get(answers, timeout=_ANSWER_S), strict=True):
        if errors:
            text = f"{source} does not reach {target}: {'; '.join(errors)}"
            way_out = "allow all TCP and UDP ports between the nodes of the cluster"
            results.append(fails("network", text, way_out))
    return results or [ok("network", f"{len(pairs)} connections between nodes, by TCP and UDP")]


def _same_storage(actors: Mapping[str, Any], storage: StorageURL, token: str) -> list[CheckResult]:
    """Each node reads what this machine has written."""
    store, name = Store(storage), f"doctor-{token}.txt"
    path = path_in(store, name)
    try:
        store.write(path, token.encode())
        asked = {where: actor.read.remote(storage, name) for where, actor in actors.items()}
        said = {where: ray.get(answer, timeout=_ANSWER_S) for where, answer in asked.items()}
    finally:
        store.delete(path)
    results = []
    for where, text in said.items():
        if text != token:
            why = text or "an object that this machine has written is not there"
            way_out = "a folder that all nodes mount, or an object store; the same credentials"
            results.append(fails("shared storage", why, way_out, where))
    return results or [ok("shared storage", f"{len(said)} nodes see what this machine writes")]
