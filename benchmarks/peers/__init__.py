"""The same kills beside other systems, each in processes of its own.

Each is looked for in an interpreter of its own, else in this one: `TORCHFT_PYTHON` (`python -m venv
DIR` and there `pip install torch==2.13.0 torchft==0.2.0`), `RAY_TRAIN_PYTHON` (`pip install
torch==2.13.0 'ray[train]==2.60.0'`), and for other loaders `DATA_PEERS_PYTHON`:

    pip install torch==2.13.0 litdata==0.2.76 datasets==5.2.0 trl==1.16.0 \
        'ray[data]==2.60.0' pyarrow==26.0.1 pillow==13.0.0
    pip install boto3 brotli 'google-cloud-storage<3.3' 'matplotlib<4' python-snappy 'zstd<2' \
        xxhash tqdm paramiko oci azure-storage-blob azure-storage-file-datalake azure-identity \
        catalogue
    pip install --no-deps mosaicml-streaming==0.13.0

Streaming comes without its dependencies, since it asks for older transformers and NumPy than the
others do, which it does not need here. torchvision is not installed: one that was built for another
torch ends with "operator torchvision::nms does not exist" (`stand_in_for_torchvision` in data.py).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def measure_all(kills: int = 10, ray_train_kills: int = 3) -> Iterator[tuple[str, Any]]:
    torchft = os.environ.get("TORCHFT_PYTHON", sys.executable)
    for kind in ("tuned", "default"):
        found = run(torchft, "torchft_recovery.py", kind, str(kills))
        yield f"torchft 0.2, {kind}, 3 workers", found
    ray_train = os.environ.get("RAY_TRAIN_PYTHON", sys.executable)
    found = run(ray_train, "ray_train_recovery.py", str(ray_train_kills))
    yield "Ray Train, checkpoint each 20 steps, 3 workers", found


def run(python: str, script: str, *arguments: str, timeout_s: float = 240.0) -> Any:
    """What the script wrote as JSON, or why there is nothing."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/result.json"
        with open(f"{folder}/output", "w+", encoding="utf-8") as output:
            command = [python, str(HERE / script), path, *arguments]
            try:
                subprocess.run(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=os.environ | {"OMP_NUM_THREADS": "1"},
                    timeout=timeout_s,
                )
            except subprocess.TimeoutExpired:
                return f"not measured: took more than {timeout_s} s"
            if not os.path.exists(path):
                output.seek(0)
                return f"not measured: {output.read().strip().splitlines()[-1:]}"
        return json.loads(Path(path).read_text())
