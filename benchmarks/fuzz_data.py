"""Damaged Parquet, Arrow, CSV, tar and JSON Lines: no crash, no hang, no untyped error, no row lost
in silence.

    python -m benchmarks.fuzz_data --inputs 100000
    python -m benchmarks.fuzz_data --kinds csv --first 4711 --inputs 1    # one input again

An input is a function of its kind and its number. Each is read in place, converted and inspected,
in a process of its own, and compared with what the producer's own reader makes of the same bytes.
"""

import argparse
import json
import sys
import time
from pathlib import Path

from tests.data.fuzz.mutations import KINDS
from tests.data.fuzz.running import run


def main() -> int:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument(
        "--inputs", type=int, default=100_000, help="in all, divided among the kinds"
    )
    options.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    options.add_argument(
        "--first", type=int, default=0, help="the number of the first input of each kind"
    )
    options.add_argument("--out", type=Path, help="JSON of what was tried and found")
    chosen = options.parse_args()
    each, results = -(-chosen.inputs // len(chosen.kinds)), {}
    for kind in chosen.kinds:
        begun = time.monotonic()
        tried = run(
            kind,
            chosen.first,
            each,
            lambda seed, text, k=kind: print(f"{k} {seed}: {text}", flush=True),
        )
        results[kind] = {
            "inputs": tried.inputs,
            "seconds": round(time.monotonic() - begun, 1),
            "outcomes": dict(tried.outcomes.most_common()),
            "findings": tried.findings,
        }
        print(
            (
                f"{kind}: {tried.inputs} inputs, {len(tried.findings)} findings, "
                f"{tried.outcomes.most_common(6)}"
            ),
            flush=True,
        )
        if chosen.out:
            chosen.out.write_text(json.dumps(results, indent=1))
    return int(any(result["findings"] for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
