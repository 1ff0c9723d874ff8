"""The alerts ask for metrics and actors that there are, and no manifest holds a secret."""

import re
from pathlib import Path

import pytest
import ray
import yaml

from tests.k8s.manifests import OVERLAYS, ROOT, SHARED, build, of_kind

RAY = Path(ray.__file__).parent


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
