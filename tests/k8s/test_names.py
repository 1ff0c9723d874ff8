"""Every environment variable and port in a manifest is one that Ray, Kubernetes or our own code
reads: `known.yaml` says who, and this looks there. A misspelt variable is read by nobody, and
nothing else would ever say so.
"""

import functools
import importlib
import re
from pathlib import Path

import pytest
import ray
import yaml

from tests.k8s.manifests import (
    K8S,
    OVERLAYS,
    ROOT,
    SHARED,
    build,
    containers,
    environment,
    of_kind,
    templates,
)

KNOWN = yaml.safe_load((Path(__file__).parent / "known.yaml").read_text())
RAY = Path(ray.__file__).parent


@pytest.mark.parametrize("name", KNOWN["environment"])
def test_ray_reads_the_variable(name):
    entry = KNOWN["environment"][name]
    if "read_by" not in entry:  # not Ray
        assert entry["says"]
        return
    text = (RAY / entry["read_by"]).read_bytes()
    in_core = entry["read_by"].startswith("core/")
    assert (name.removeprefix("RAY_") if in_core else name).encode() in text


@pytest.mark.parametrize("port", KNOWN["ports"])
def test_the_port_is_who_it_is_said_to_be(port):
    entry = KNOWN["ports"][port]
    if "constant" not in entry:
        assert entry["says"]
        return
    module, _, constant = entry["constant"].partition(":")
    assert getattr(importlib.import_module(module), constant) == port


@pytest.mark.parametrize("folder", OVERLAYS)
def test_a_manifest_names_no_other_variable(folder):
    for where, container in containers(build(folder)):
        for name in environment(container):
            assert name in KNOWN["environment"] or name in _read_by_us(), f"{where}: {name}"


@pytest.mark.parametrize("folder", OVERLAYS)
def test_a_manifest_names_no_other_port(folder):
    objects = build(folder)
    for template in templates(objects).values():
        for port in template["spec"]["containers"][0]["ports"]:
            assert port["containerPort"] in KNOWN["ports"], port
    for policy in of_kind(objects, "NetworkPolicy"):
        for rule in [*policy["spec"]["ingress"], *policy["spec"]["egress"]]:
            for port in rule.get("ports", []):
                assert port["port"] in KNOWN["ports"], port


def test_known_variables_and_ports_are_all_in_a_manifest():
    objects = [build(folder) for folder in OVERLAYS]
    named = {name for made in objects for _, c in containers(made) for name in environment(c)}
    assert named == set(KNOWN["environment"])
    text = "".join(path.read_text() for path in K8S.rglob("*.yaml"))
    for port in KNOWN["ports"]:
        assert re.search(rf"\b(port|containerPort): {port}\b", text), port


def test_prometheus_asks_ports_that_pods_have():
    [monitor] = of_kind(build("monitoring"), "PodMonitor")
    asked = {endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]}
    pods = templates(build("overlays/eks-spot"))
    ports = {p["name"] for pod in pods.values() for p in pod["spec"]["containers"][0]["ports"]}
    assert asked <= ports
    for pod in pods.values():
        assert "metrics" in {port["name"] for port in pod["spec"]["containers"][0]["ports"]}


def test_rules_ask_for_metrics_and_actors_that_there_are():
    [rules] = of_kind(build("monitoring"), "PrometheusRule")
    asked = " ".join(rule["expr"] for group in rules["spec"]["groups"] for rule in group["rules"])
    core = (RAY / "core/src/ray/gcs/gcs_server").read_bytes()
    metrics = set(re.findall(r"\bray_(?!elastic_dp)([a-z_]+)\{|increase\(ray_([a-z_]+)\[", asked))
    assert metrics
    for metric in metrics:
        assert "".join(metric).encode() in core
    actors = "".join(
        path.read_text() for path in (ROOT / "elastic_dp/cluster/ray").glob("*_actor.py")
    )
    named = set(re.findall(r'Name="(\w+)"', asked))
    assert named
    for actor in named:
        assert f"class {actor}:" in actors


@pytest.mark.parametrize("folder", [*OVERLAYS, *SHARED])
def test_secrets_only_by_reference(folder):
    objects = build(folder)
    assert not of_kind(objects, "Secret")
    text = yaml.safe_dump(objects)
    assert "runtimeEnvYAML" not in text  # Ray logs what is in it
    lines = re.findall(r".*(?:password|token|secret|credential|_key):[ ]*\S+$", text, re.I | re.M)
    assert lines or folder in SHARED, "each run says at least how it authenticates"
    for line in lines:
        field = line.strip().partition(":")[0]
        assert field in ("mode", "automountServiceAccountToken"), line


@functools.cache
def _read_by_us() -> frozenset[str]:
    text = "".join(path.read_text() for path in (ROOT / "elastic_dp").rglob("*.py"))
    return frozenset(re.findall(r'environ(?:\.get\(|\[)"(\w+)"', text))
