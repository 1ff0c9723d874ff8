"""Whether processes live."""

from __future__ import annotations

from pathlib import Path


def lives(pid: int) -> bool:
    """Whether the process runs, waits or is frozen. One that has ended and that nobody has waited
    for yet does not."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return False
    return words[0] not in "ZX"
