"""A copy of `k8s/` whose params.env files are filled in, as a user fills them in. The shipped ones
have blanks, which kustomize refuses.
"""

import atexit
import functools
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

K8S = Path(__file__).parents[2] / "k8s"
IMAGE = "registry.example.com/elastic-dp:0.1.0-cuda"
ANSWERS: dict[str, dict[str, str]] = {
    "gke": {
        "image": IMAGE,
        "storage_path": "gs://example-training/runs",
        "data_url": "gs://example-training/stdlib-bytes",
        "service_account": "elastic-dp@example-project.iam.gserviceaccount.com",
    },
    "eks": {
        "image": IMAGE,
        "storage_path": "s3://example-training/runs",
        "data_url": "s3://example-training/stdlib-bytes",
        "role_arn": "arn:aws:iam::111122223333:role/elastic-dp",
    },
    "aks": {
        "image": IMAGE,
        "storage_path": "abfss://training@example.dfs.core.windows.net/runs",
        "data_url": "abfss://training@example.dfs.core.windows.net/stdlib-bytes",
        "client_id": "11112222-3333-4444-5555-666677778888",
    },
    "minio": {
        "image": IMAGE,
        "storage_path": "s3://example-training/runs",
        "data_url": "s3://example-training/stdlib-bytes",
    },
    "nfs": {
        "image": IMAGE,
        "data_url": "s3://example-training/stdlib-bytes",
        "proxy": "http://proxy.example.com:3128",
    },
    "kind": {},
}


def params(cloud: str) -> dict[str, str]:
    """The shipped file's values, blanks included."""
    text = (K8S / "params" / cloud / "params.env").read_text()
    return dict(re.findall(r"^(\w+)=(.*)$", text, re.M))


def copy_filled(target: Path, changes: Mapping[str, Mapping[str, str]] | None = None) -> Path:
    """`k8s/` at `target` with all blanks filled in, and what `changes` has for each cloud
    besides."""
    shutil.copytree(K8S, target)
    for cloud, answers in ANSWERS.items():
        values = params(cloud) | answers | dict((changes or {}).get(cloud, {}))
        lines = [f"{key}={value}\n" for key, value in values.items()]
        (target / "params" / cloud / "params.env").write_text("".join(lines))
    return target


@functools.cache
def filled() -> Path:
    """One copy for all tests of this process."""
    folder = Path(tempfile.mkdtemp(prefix="elastic-dp-k8s-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return copy_filled(folder / "k8s")
