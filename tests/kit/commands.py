"""Commands in an environment that has nothing of this one's."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any


def run(*words: Any, cwd: Path, shell: bool = False, **env: str) -> str:
    """Return what it prints; it must end with 0."""
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        str(words[0]) if shell else [str(word) for word in words],
        shell=shell,
        cwd=cwd,
        env=clean | {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"} | env,
        capture_output=True,
        text=True,
        timeout=1500,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout
