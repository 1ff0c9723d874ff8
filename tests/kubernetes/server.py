"""The cluster's server, and objects as the installed KubeRay takes them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from tests.k8s.manifests import _kubectl, cluster


def kubectl(*words: str, objects: Any = (), seconds: float = 120) -> tuple[int, str]:
    done = subprocess.run(
        [_kubectl(), *words],
        input=yaml.safe_dump_all(objects),
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    return done.returncode, done.stdout + done.stderr


def for_kuberay(objects: list[dict[str, Any]], has_priorities: bool) -> list[dict[str, Any]]:
    """Remove what KubeRay 1.6 refuses, as k8s/README.md says."""
    if not has_priorities:
        for group in cluster(objects)["workerGroupSpecs"]:
            group.pop("priority", None)
        for name in ("command", "args"):
            cluster(objects)["autoscalerOptions"].pop(name, None)
        options = cluster(objects).get("gcsFaultToleranceOptions", {})
        if "redisAddress" in options:  # it knows nothing but Redis
            del options["backend"]
    return objects


def build_image(folder: Path, root: Path, program: str) -> None:
    """Make the image elastic-dp:cpu by k8s/Dockerfile, as it stands, and give it to all nodes.

    Debian's Python stands for the image python:3.11-slim-bookworm, and packages come from where
    pip has them on this machine.
    """
    system = folder / "system"
    packages = "python3,python3-pip,python3-venv,ca-certificates,procps"
    _sh("debootstrap", "--variant=minbase", f"--include={packages}", "bookworm", system)
    (system / "usr/bin/python").symlink_to("python3")
    (system / "usr/lib/python3.11/EXTERNALLY-MANAGED").unlink()
    settings = _sh(sys.executable, "-m", "pip", "config", "list").splitlines()
    found = {key: value.strip("'") for key, _, value in (line.partition("=") for line in settings)}
    known = {name: found.get(f"global.{name}", "") for name in ("find-links", "extra-index-url")}
    (folder / "pip.conf").write_text(
        "[global]\nretries = 0\n" + "".join(f"{key} = {value}\n" for key, value in known.items())
    )
    places = [Path(word) for word in known["find-links"].split()]
    # The files of an index lie beside it.
    indexes = known["extra-index-url"].replace("file://", "").split()
    places += [Path(word).parent for word in indexes]
    mounts = {folder / "pip.conf": "/etc/pip.conf", "/etc/ssl/certs": "/etc/ssl/certs"}
    mounts |= {place: place for place in places if place.is_dir()}
    buildah = "buildah", "--root", folder / "store", "--runroot", folder / "run"
    try:
        base = _sh(*buildah, "from", "scratch").strip()
        _sh(*buildah, "copy", "-q", base, system, "/")
        _sh(*buildah, "commit", "-q", base, "docker.io/library/python:3.11-slim-bookworm")
        volumes = [word for here, there in mounts.items() for word in ("-v", f"{here}:{there}:ro")]
        options = "--pull-never", "--format=docker", "--network=host", *volumes
        options = *options, "--ignorefile", root / "k8s/Dockerfile.dockerignore"
        _sh(*buildah, "build", *options, "-f", root / "k8s/Dockerfile", "-t", "made", root)
        made = _sh(*buildah, "from", "--pull-never", "made").strip()
        files = _sh(*buildah, "mount", made).strip()
        path = "PATH=/usr/local/bin:/usr/bin:/bin"
        _sh(program, "image", "elastic-dp:cpu", files, "--user", "1000:1000", "--env", path)
    finally:
        _sh(*buildah, "rm", "--all")
        shutil.rmtree(folder)


def _sh(*words: object) -> str:
    environment = os.environ | {"BUILDAH_ISOLATION": "chroot", "STORAGE_DRIVER": "overlay"}
    command = [str(word) for word in words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, (command, done.stderr[-2000:])
    return done.stdout
