"""The step of a GPT in bf16 on one device, compared with a plain loop: fast and exact, eager and
compiled. Each case runs in a process of its own, since exact runs set flags of the whole process.

    python -m benchmarks.gpu_step --case "124M exact" [--small]
    python -m benchmarks.gpu_step [--small] [--limit 140]

A step has four micro-batches. Quoted are the median time, the range, the time relative to the plain
loop, tokens a second and the peak of the device's memory.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.models import GPT, RandomTokens
from elastic_dp.cluster.worker import prepare_environment
from elastic_dp.config import DataConfig, JobSpec, ScalingConfig
from elastic_dp.train.local_run import LocalRun

SIZES = {"124M": (768, 12, 8), "350M": (1024, 24, 8)}  # width, depth, rows of a micro-batch
SMALL = {"124M": (32, 12, 2)}
MICRO_BATCHES, WARM_UP_STEPS, STEPS = 4, 4, 14
CASES = (
    *("124M plain", "124M fast", "124M exact", "350M plain", "350M fast", "350M exact"),
    *("124M plain compiled", "124M fast compiled", "124M exact compiled"),
    *("350M plain compiled", "350M fast compiled", "350M exact compiled"),
)
CASE_LIMIT_S = 60.0
OUT_OF_TIME = "out of time"


def loss_fn(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = model(batch["tokens"][:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), batch["tokens"][:, 1:].flatten())


class FixedRows(RandomTokens):
    """The same micro-batches in each step: making rows is not what is timed."""

    def __init__(self, rows: int, length: int, vocabulary: int) -> None:
        super().__init__(rows, length, vocabulary)
        self._made: dict[int, dict[str, torch.Tensor]] = {}

    def batch(self, step: int, virtual_worker: int) -> dict[str, torch.Tensor]:
        if virtual_worker not in self._made:
            self._made[virtual_worker] = super().batch(0, virtual_worker)
        return self._made[virtual_worker]


def measure(case: str, *, small: bool) -> dict[str, Any]:
    """Return the facts of one case, measured in this process."""
    size, mode, *how = case.split()
    width, depth, rows = (SMALL if small else SIZES)[size]
    vocabulary, length = (256, 32) if small else (50304, 1024)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    torch.set_num_threads(1)
    ends, parameters = list[float](), [0]

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        with device:
            model = GPT(width, depth, vocabulary, length)
        parameters[0] = sum(p.numel() for p in model.parameters())
        if how:
            model.compile()
        fused = True if device.type == "cuda" else None
        return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused)

    def end_step() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()
        ends.append(time.perf_counter())

    data = FixedRows(rows, length + 1, vocabulary)
    run = plain if mode == "plain" else ours
    digest = run(data, device, made, end_step, exact=mode == "exact")
    took = [later - at for at, later in itertools.pairwise(ends)][WARM_UP_STEPS:]
    seconds, tokens = statistics.median(took), MICRO_BATCHES * rows * length
    memory = torch.cuda.max_memory_allocated() / 1e9 if device.type == "cuda" else None
    return {
        "case": case,
        "ms": round(1e3 * seconds, 2),
        "range_ms": [round(1e3 * min(took), 2), round(1e3 * max(took), 2)],
        "tokens_s": round(tokens / seconds),
        "tflops": round(6 * parameters[0] * tokens / seconds / 1e12, 1),
        "gb": memory and round(memory, 2),
        "digest": digest,
    }


Made = Callable[[], tuple[nn.Module, torch.optim.Optimizer]]


def plain(
    data: FixedRows, device: torch.device, made: Made, end_step: Callable[[], None], *, exact: bool
) -> None:
    """A loop as one writes it without this package."""
    model, optimizer = made()
    batches = [data.batch(0, v) for v in range(MICRO_BATCHES)]
    if device.type == "cuda":
        batches = [{key: t.pin_memory() for key, t in batch.items()} for batch in batches]
    for _ in range(STEPS):
        for rows in batches:
            batch = {key: t.to(device, non_blocking=True) for key, t in rows.items()}
            with torch.autocast(device.type, torch.bfloat16):
                loss = loss_fn(model, batch)
            (loss / MICRO_BATCHES).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        end_step()


def ours(
    data: FixedRows, device: torch.device, made: Made, end_step: Callable[[], None], *, exact: bool
) -> str:
    prepare_environment(os.environ, 1)
    spec = JobSpec(
        name="step",
        data=DataConfig("none", micro_batch_size=1),
        scaling=ScalingConfig(max_workers=1, virtual_workers=MICRO_BATCHES),
        exact=exact,
        max_steps=STEPS,
    )

    def train(ctx: Any) -> None:
        model, optimizer = made()
        for _ in ctx.steps(model, optimizer, loss_fn, precision="bf16", clip_norm=1.0):
            end_step()

    run = LocalRun(spec, data, device)
    run.run(train)
    return run.digest[:16]


def measure_all(*, small: bool, limit_s: float) -> Iterator[dict[str, Any]]:
    """Yield the facts of each case, with its time relative to the plain loop's, or why there are
    none. On a processor nothing is compiled."""
    until, plain_ms = time.monotonic() + limit_s, dict[str, float]()
    for case in CASES:
        size, mode, *how = case.split()
        if size not in (SMALL if small else SIZES) or (how and not torch.cuda.is_available()):
            continue
        command = [sys.executable, "-m", "benchmarks.gpu_step", "--case", case]
        left_s = min(CASE_LIMIT_S, until - time.monotonic())
        if left_s <= 0:
            yield {"case": case, "why": OUT_OF_TIME}
            continue
        try:
            ended = subprocess.run(
                command + (["--small"] if small else []),
                capture_output=True,
                text=True,
                timeout=left_s,
            )
        except subprocess.TimeoutExpired:
            yield {"case": case, "why": f"no result after {left_s:.0f} s"}
            continue
        if ended.returncode:
            yield {"case": case, "why": ended.stderr[-700:]}
            continue
        found = json.loads(ended.stdout.splitlines()[-1])
        kind = " ".join([size, *how])
        if mode == "plain":
            plain_ms[kind] = found["ms"]
        compared = kind in plain_ms
        yield found | {"relative": round(found["ms"] / plain_ms[kind], 3) if compared else None}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", choices=CASES)
    parser.add_argument("--small", action="store_true", help="sizes for a processor")
    parser.add_argument("--limit", type=float, default=140.0, help="seconds for all cases")
    options = parser.parse_args(arguments)
    if options.case is not None:
        print(json.dumps(measure(options.case, small=options.small)), flush=True)
        return 0
    found = list(measure_all(small=options.small, limit_s=options.limit))
    for one in found:
        print(json.dumps(one), flush=True)
    return int(any("why" in one for one in found))


if __name__ == "__main__":
    sys.exit(main())
