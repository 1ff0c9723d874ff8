"""Judges what machines are like. Pure: the facts come as arguments.

Limits come from what Ray and the libraries say: Ray wants 4096 open files, object stores refuse
requests that are signed 15 minutes off, and Ray gives a node up after `failures` health checks that
each take up to `period + timeout`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from elastic_dp.cluster.doctor.check_result import CheckResult, fails, ok, warning
from elastic_dp.cluster.doctor.node_facts import NodeFacts
from elastic_dp.wording import first_few

# What pyproject.toml asks for.
MINIMUM = {"torch": (2, 11), "ray": (2, 56), "pyarrow": (17, 0)}
PYTHON = ((3, 11), (3, 14))  # from the first one to below the second one
OPEN_FILES = 4096
_MIB, _GIB = 1 << 20, 1 << 30
SHM_BYTES = 128 * _MIB  # more than the 64 MiB that containers have unless they are told
SHM_BYTES_WITH_GPUS = 1 * _GIB
SLOW_NOTICE_S = 15.0
CLOCK_OFFSET_S, CLOCK_LIMIT_S = 1.0, 900.0


def check_machine(facts: NodeFacts, where: str = "") -> list[CheckResult]:
    """Return the checks of one machine by itself."""
    return [
        *_versions(facts, where),
        _ports(facts, where),
        *_gpus(facts, where),
        _shared_memory(facts, where),
        _open_files(facts, where),
    ]


def check_together(nodes: Mapping[str, NodeFacts]) -> list[CheckResult]:
    """Return what is judged of all nodes of a cluster together."""
    return [*_same(nodes), *_ray_settings(nodes)]


def check_clock(where: str, offset_s: float, within_s: float) -> CheckResult:
    """Judge the clock of a node, whose offset from this machine's is known `within_s`."""
    text = f"{offset_s:+.3f} s from this machine's clock, measured within {within_s:.3f} s"
    away = max(0.0, abs(offset_s) - within_s)
    way_out = "run an NTP client (chrony, systemd-timesyncd) on every node"
    if away > CLOCK_LIMIT_S:
        return fails("clock", f"{text}: object stores refuse signed requests", way_out, where)
    if away > CLOCK_OFFSET_S:
        why = "notices of nodes that go away are acted on too early or too late"
        return warning("clock", f"{text}: {why}", way_out, where)
    return ok("clock", text, where)


# ---------------------------------------------------------------------------------- private


def _versions(facts: NodeFacts, where: str) -> Iterator[CheckResult]:
    found = ", ".join(f"{name} {number}" for name, number in facts.versions.items())
    wrong = []
    if not PYTHON[0] <= _number(facts.python) < PYTHON[1]:
        wrong.append(f"Python {facts.python} is not 3.{PYTHON[0][1]} to 3.{PYTHON[1][1] - 1}")
    for name, least in MINIMUM.items():
        if name not in facts.versions:
            wrong.append(f"{name} is not installed")
        elif _number(facts.versions[name]) < least:
            wanted = ".".join(map(str, least))
            wrong.append(f"{name} {facts.versions[name]} is older than {wanted}")
    if wrong:
        way_out = "pip install -c constraints.txt '.[cli]' in an environment of Python 3.11 to 3.13"
        yield fails("versions", "; ".join(wrong), way_out, where)
    else:
        yield ok("versions", f"Python {facts.python}, {found}", where)


def _ports(facts: NodeFacts, where: str) -> CheckResult:
    if facts.port_errors:
        return fails(
            "ports",
            f"no free port of {facts.host} can be bound and reached: "
            f"{'; '.join(facts.port_errors)}",
            "allow connections of this machine to itself; if the address is wrong, start Ray with "
            "--node-ip-address",
            where,
        )
    return ok("ports", f"TCP and UDP ports of {facts.host} can be bound and reached", where)


def _gpus(facts: NodeFacts, where: str) -> Iterator[CheckResult]:
    gpus = facts.gpus
    if gpus is None or (gpus.error and not facts.gpus_of_ray):
        if facts.gpus_of_ray:
            text = f"Ray counts {facts.gpus_of_ray:g}, but the machine has no driver for them"
            yield fails("GPUs", text, "mend the image, or start Ray with --num-gpus 0", where)
        else:
            yield ok("GPUs", "none; workers train on CPUs" + _because(facts), where)
    elif gpus.error:
        text = f"Ray counts {facts.gpus_of_ray:g}, but torch finds none: {gpus.error}"
        way_out = "mend the image, or train with scaling.resources_per_worker.GPU=0"
        yield fails("GPUs", text, way_out, where)
    else:
        kinds = {name: gpus.names.count(name) for name in gpus.names}
        words = ", ".join(f"{count} × {name}" for name, count in kinds.items())
        yield ok("GPUs", f"{words}; NCCL {gpus.nccl}", where)


def _because(facts: NodeFacts) -> str:
    return f" ({facts.gpus.error})" if facts.gpus is not None and facts.gpus.error else ""


def _shared_memory(facts: NodeFacts, where: str) -> CheckResult:
    many = facts.gpus is not None and len(facts.gpus.names) > 1
    least = SHM_BYTES_WITH_GPUS if many else SHM_BYTES
    user = "NCCL, which connects GPUs of one node by it" if many else "Ray's object store"
    way_out = "docker run --shm-size=8g; in Kubernetes an emptyDir with medium: Memory at /dev/shm"
    if facts.shm_bytes is None:
        return warning("shared memory", "there is no /dev/shm", way_out, where)
    text = f"/dev/shm has {facts.shm_bytes / _MIB:.0f} MiB"
    if facts.shm_bytes < least:
        why = f"{text}, less than {least // _MIB} MiB, for {user}"
        return warning("shared memory", why, way_out, where)
    return ok("shared memory", text, where)


def _open_files(facts: NodeFacts, where: str) -> CheckResult:
    if 0 <= facts.open_files < OPEN_FILES:
        text = f"a process may open {facts.open_files} files and connections"
        way_out = f"ulimit -n 65536 before `ray start`: Ray wants at least {OPEN_FILES}"
        return warning("open files", text, way_out, where)
    most = "any number of" if facts.open_files < 0 else f"{facts.open_files}"
    return ok("open files", f"a process may open {most} files", where)


def _same(nodes: Mapping[str, NodeFacts]) -> Iterator[CheckResult]:
    """Python, torch and the package must be the same on all nodes, or the bits may differ."""
    ways: dict[str, list[str]] = {}
    for where, facts in nodes.items():
        named = {"Python": ".".join(facts.python.split(".")[:2]), **facts.versions}
        if facts.gpus is not None and facts.gpus.nccl:
            named["NCCL"] = facts.gpus.nccl
        for name, number in named.items():
            ways.setdefault(f"{name} {number}", []).append(where)
    kinds: dict[str, list[str]] = {}
    for way in ways:
        kinds.setdefault(way.split(" ")[0], []).append(way)
    differ = [each for each in kinds.values() if len(each) > 1]
    if not differ:
        yield ok("same versions", f"all {len(nodes)} nodes have the same versions")
    for each in differ:
        text = "; ".join(f"{way} on {first_few(ways[way])}" for way in each)
        yield fails("same versions", text, "give all nodes one image")


def _ray_settings(nodes: Mapping[str, NodeFacts]) -> Iterator[CheckResult]:
    heads = [facts for facts in nodes.values() if facts.head and facts.health_check is not None]
    for facts in heads:
        assert facts.health_check is not None
        period_s, timeout_s, failures = facts.health_check
        after_s = failures * (period_s + timeout_s)
        text = f"Ray notices a node that froze or lost its network after up to {after_s:.0f} s"
        if after_s > SLOW_NOTICE_S:
            way_out = (
                "on the head, before `ray start`: RAY_health_check_period_ms=1000 "
                "RAY_health_check_timeout_ms=3000 RAY_health_check_failure_threshold=3"
            )
            yield warning("Ray health checks", f"{text}; it is replaced only then", way_out)
        else:
            yield ok("Ray health checks", text)
    nice = {where: facts.niceness for where, facts in nodes.items() if facts.niceness > 0}
    if nice:
        most = max(nice.values())
        yield warning(
            "Ray worker niceness",
            f"workers run with niceness {most} on {first_few(nice)}: whatever else runs there goes "
            "first, also while a group forms again after a failure",
            "RAY_worker_niceness=0 on every node, before `ray start`",
        )
    elif nodes:
        yield ok("Ray worker niceness", "workers run with the priority of other processes")


def _number(text: str) -> tuple[int, ...]:
    found = re.match(r"(\d+)(?:\.(\d+))?", text)
    return (0, 0) if found is None else (int(found[1]), int(found[2] or 0))
