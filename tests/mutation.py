"""Names of some mutants, the same each time, for `make mutation`: those that the last run made.

python -m tests.mutation 200
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

MADE = Path(__file__).parent.parent / "mutants"


def sample(count: int, seed: int = 0) -> list[str]:
    known = [json.loads(path.read_text()) for path in sorted(MADE.rglob("*.meta"))]
    names = [name for file in known for name in file["exit_code_by_key"]]
    return random.Random(seed).sample(names, count)


if __name__ == "__main__":
    print("\n".join(sample(int(sys.argv[1]))))
