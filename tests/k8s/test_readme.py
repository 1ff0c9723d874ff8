"""What k8s/README.md says is there: folders, verbs, and the field that governs each failure."""

import re

import typer

from elastic_dp.cli import app
from elastic_dp.spec import JobSpec
from tests.k8s.fields import is_field
from tests.k8s.manifests import K8S, OVERLAYS, ROOT, SHARED

README = (K8S / "README.md").read_text()
OF_THE_OPERATOR = {"RAYJOB_STATUS_CHECK_TIMEOUT_SECONDS"}


def test_commands_name_kustomizations_that_there_are():
    named = set(re.findall(r"-k k8s/([\w/-]+)", README))
    assert named <= {*OVERLAYS, *SHARED}
    said = {folder for folder in OVERLAYS if folder.removeprefix("overlays/") in README}
    assert said == set(OVERLAYS)


def test_commands_name_verbs_that_there_are():
    commands = typer.main.get_command(app)
    verbs = re.findall(r"\bedp \w+ ([a-z]+)", README) + re.findall(r"`elastic-dp ([a-z]+)", README)
    assert {"status", "scale", "stop", "submit", "drain", "restart", "data"} <= set(verbs)
    assert set(verbs) <= set(commands.commands)
    for group, verb in re.findall(r"`elastic-dp (data|checkpoints) ([a-z]+)", README):
        assert verb in commands.commands[group].commands


def test_each_failure_is_governed_by_a_field_that_there_is():
    table = README.partition("## What happens when")[2]
    governors = [row.rpartition("|")[0].rpartition("|")[2] for row in table.splitlines()]
    named = set(re.findall(r"`([^`]+)`", " ".join(governors))) - OF_THE_OPERATOR
    manifests = "".join(path.read_text() for path in K8S.rglob("*.yaml"))
    for name in named:
        path = name.partition(":")[0].split(".")
        in_a_manifest = all(re.search(rf"\b{step}\b", manifests) for step in path)
        assert in_a_manifest or is_field(JobSpec, path), name
    assert len(named) > 15


def test_paths_are_there():
    for path in re.findall(r"`((?:k8s|tests|jobs)/[\w./-]+)`", README):
        assert (ROOT / path).exists(), path
    for folder in re.findall(r"^\| `([a-z/]+)/`", README, re.M):
        assert (K8S / folder).is_dir(), folder
