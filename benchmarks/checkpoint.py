"""What a checkpoint costs the training loop and the processors, and how fast it comes back, beside
torch's own ways.

    python -m benchmarks.checkpoint [--part save|memory|restore|far …] [--rounds 7] [--megabytes
    500]

All save and read the same state (291 tensors: weights and two moments, on the host) in turn,
several times; a ratio is the median of those of single rounds.

- save: how long the call keeps the loop waiting, CPU seconds until all is on the disk, and the time
  of a training step meanwhile beside one in peace. `bare copy` is a copy of each tensor into memory
  that is there already.
- memory: what a process grows by at most for a checkpoint, beside the state: one more state, by the
  documented choice.
- restore: from files in the page cache into memory that is there already, beside a bare `readinto`
  of the same files, both by as many threads as there are cores.
- far: from an S3-like server with 20 ms before each answer and 90 MB/s per connection, beside bare
  ranges by obstore.

Parts that are not measured keep their last results.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from benchmarks.recovery import outside_load
from benchmarks.report import each, parser_of, ratio, spread
from benchmarks.slow_store import BUCKET, serving
from elastic_dp.checkpoint.catalog import Catalog
from elastic_dp.checkpoint.checkpoint_reader import load
from elastic_dp.checkpoint.checkpoint_writer import write_commit
from elastic_dp.checkpoint.commit_record import CommitMetadata
from elastic_dp.checkpoint.uploader import Uploader
from elastic_dp.storage import Store

TENSORS, RANGE_BYTES, IN_FLIGHT = 97, 8 << 20, 32
ALONE: Any = {"writer": "w0", "members": ["w0"]}


def make_state(megabytes: int) -> dict[str, Any]:
    count = megabytes * 1_000_000 // 4 // 3 // TENSORS
    weights = {f"layers.{i}.weight": torch.randn(count) for i in range(TENSORS)}
    moments = [
        {"exp_avg": torch.randn(count), "exp_avg_sq": torch.rand(count)} for _ in range(TENSORS)
    ]
    return {"step": {"parameters": weights, "optimizer": moments}}


def flat(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    found = dict(state["step"]["parameters"])
    for i, moments in enumerate(state["step"]["optimizer"]):
        found |= {f"optimizer.{i}.{name}": tensor for name, tensor in moments.items()}
    return found


class Save:
    """Ways to save, each a function of a number that begins and returns what waits for its end."""

    def __init__(self, state: dict[str, Any], folder: Path) -> None:
        self.state, self.tensors, self.folder = state, flat(state), folder
        self.copies = {name: torch.zeros_like(t) for name, t in self.tensors.items()}
        self.catalog = Catalog(Store(str(folder / "ours")))
        self.uploader = Uploader(self.catalog, lambda blobs: None)
        self.ways: dict[str, Callable[[int], Callable[[], Any]]] = {
            "bare copy": self.bare_copy,
            "ours": self.ours,
            "torch.save": self.torch_save,
            "dcp.save": self.dcp_save,
            "dcp.async_save": self.dcp_async_save,
        }

    def bare_copy(self, number: int) -> Callable[[], Any]:
        for name, tensor in self.tensors.items():
            self.copies[name].copy_(tensor)
        return lambda: None

    def ours(self, number: int) -> Callable[[], Any]:
        self.uploader.take(number, self.state, **ALONE)

        def commit() -> None:
            share = self.uploader.wait()
            assert share is not None
            write_commit(self.catalog, [share], 1, CommitMetadata())

        return commit

    def torch_save(self, number: int) -> Callable[[], Any]:
        torch.save(self.tensors, self.folder / f"{number}.pt")
        return lambda: None

    def dcp_save(self, number: int) -> Callable[[], Any]:
        dcp.save(self.tensors, checkpoint_id=self.folder / f"dcp-{number}")
        return lambda: None

    def dcp_async_save(self, number: int) -> Callable[[], Any]:
        future = dcp.async_save(self.tensors, checkpoint_id=self.folder / f"async-{number}")
        return future.result  # type: ignore[union-attr]


def save(megabytes: int, rounds: int, folder: Path) -> dict[str, Any]:
    ways = Save(make_state(megabytes), folder)
    peace = training_steps(lambda: True, 50)
    found: dict[str, dict[str, list[float]]] = {name: {} for name in ways.ways}
    for number in range(rounds + 1):
        for name, way in ways.ways.items():
            measured = measure_save(way, number + 1)
            shutil.rmtree(
                folder
            )  # before the next one, so that none pays for another's dirty pages
            folder.mkdir()
            os.sync()
            for key, value in measured.items() if number else ():  # the first one makes its buffers
                found[name].setdefault(key, []).append(value)
    ways.uploader.close()
    report: dict[str, Any] = {
        name: {key: spread(values) for key, values in measured.items()}
        for name, measured in found.items()
    }
    report["step_ms in peace"] = round(peace, 2)
    ours = found["ours"]
    report["ratios"] = {
        "stall / bare copy": ratio(ours["stall_ms"], found["bare copy"]["stall_ms"], 1.3),
        "stall / dcp.async_save": ratio(ours["stall_ms"], found["dcp.async_save"]["stall_ms"], 0.5),
        "cpu / torch.save": ratio(ours["cpu_s"], found["torch.save"]["cpu_s"], 1.0),
        "cpu / dcp.save": ratio(ours["cpu_s"], found["dcp.save"]["cpu_s"], 1.0),
        "cpu / dcp.async_save": ratio(ours["cpu_s"], found["dcp.async_save"]["cpu_s"], 1.0),
    }
    return report


def measure_save(way: Callable[[int], Callable[[], Any]], number: int) -> dict[str, float]:
    """Once in peace for the processors' time, once with training beside it for the steps."""
    cpu, begun_at = time.process_time(), time.perf_counter()
    wait = way(2 * number)
    stalled_at = time.perf_counter()
    wait()
    found = {
        "stall_ms": 1e3 * (stalled_at - begun_at),
        "total_s": time.perf_counter() - begun_at,
        "cpu_s": time.process_time() - cpu,
    }
    wait = way(2 * number + 1)
    with ThreadPoolExecutor(1) as executor:
        ended = executor.submit(wait)
        found["step_ms meanwhile"] = training_steps(ended.done, 1)
    ended.result()
    return found


def training_steps(done: Callable[[], bool], at_least: int) -> float:
    """Mean milliseconds of a step of small operations, until done."""
    weight, batch = torch.randn(256, 256), torch.randn(64, 256)
    count, begun_at = 0, time.perf_counter()
    while count < at_least or not done():
        for _ in range(20):
            batch = torch.tanh(batch @ weight)
        count += 1
    return 1e3 * (time.perf_counter() - begun_at) / count


def memory(megabytes: int, rounds: int, folder: Path) -> dict[str, Any]:
    state = make_state(megabytes)
    nbytes = sum(tensor.nbytes for tensor in flat(state).values())
    uploader = Uploader(Catalog(Store(str(folder / "ours"))), lambda blobs: None)
    before = _kib("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    for step in range(rounds):
        uploader.take(step, state, **ALONE)
        uploader.wait()
    uploader.close()
    grown = [1024 * (_kib("VmHWM") - before) / nbytes]
    return {"host memory / state": {**spread(grown), "target": 1.1}}


def _kib(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


def restore(megabytes: int, rounds: int, folder: Path) -> dict[str, Any]:
    commit = write_one(megabytes, folder)
    catalog = Catalog(Store(str(folder / "ours")))
    files = sorted((folder / "ours").rglob("*.safetensors"))
    sizes = [file.stat().st_size for file in files]
    room = memoryview(bytearray(sum(sizes)))
    starts = [sum(sizes[:i]) for i in range(len(sizes))]

    def read_file(i: int) -> None:
        with open(files[i], "rb", buffering=0) as file:
            assert file.readinto(room[starts[i] : starts[i] + sizes[i]]) == sizes[i]

    def bare() -> None:
        with ThreadPoolExecutor(os.cpu_count()) as executor:
            list(executor.map(read_file, range(len(files))))

    return in_turn(rounds, commit.nbytes, lambda: load(catalog, commit), bare)


def far(megabytes: int, rounds: int, folder: Path) -> dict[str, Any]:
    import obstore
    from obstore.store import S3Store

    commit = write_one(megabytes, folder)
    room = memoryview(bytearray(commit.nbytes + (1 << 20)))
    ranges = []
    for file in sorted((folder / "ours").rglob("*.safetensors")):
        key, size = str(file.relative_to(folder)), file.stat().st_size
        ranges += [(key, at, min(at + RANGE_BYTES, size)) for at in range(0, size, RANGE_BYTES)]
    with serving(folder, latency_s=0.02, bytes_per_s=90e6) as url:
        client = S3Store(
            BUCKET, endpoint=url, access_key_id="x", secret_access_key="x", region="us-east-1",
            client_options={"allow_http": True},
        )  # fmt: skip
        options = {
            **{"access_key_id": "x", "secret_access_key": "x"},
            **{"endpoint": url, "region": "us-east-1"},
        }
        catalog = Catalog(Store(f"s3://{BUCKET}/ours", options))

        def read(i: int) -> None:
            key, start, end = ranges[i]
            content = memoryview(obstore.get_range(client, key, start=start, end=end))
            room[: end - start] = content

        def bare() -> None:
            with ThreadPoolExecutor(IN_FLIGHT) as executor:
                list(executor.map(read, range(len(ranges))))

        return in_turn(rounds, commit.nbytes, lambda: load(catalog, commit), bare)


def write_one(megabytes: int, folder: Path) -> Any:
    uploader = Uploader(Catalog(Store(str(folder / "ours"))), lambda blobs: None)
    uploader.take(1, make_state(megabytes), **ALONE)
    share = uploader.wait()
    assert share is not None
    commit = write_commit(uploader._catalog, [share], 1, CommitMetadata())
    uploader.close()
    return commit


def in_turn(
    rounds: int, nbytes: int, ours: Callable[[], Any], bare: Callable[[], Any]
) -> dict[str, Any]:
    speeds: dict[str, list[float]] = {"ours": [], "bare": []}
    for number in range(rounds + 1):
        for name, call in (("ours", ours), ("bare", bare)):
            begun_at = time.perf_counter()
            call()
            if number:
                speeds[name].append(nbytes / 1e6 / (time.perf_counter() - begun_at))
    report: dict[str, Any] = {f"{name} MB/s": spread(values) for name, values in speeds.items()}
    return {**report, "ours / bare": ratio(speeds["ours"], speeds["bare"], 0.8)}


def main() -> None:
    parts = {"save": save, "memory": memory, "restore": restore, "far": far}
    parser = parser_of(__doc__, rounds=7, megabytes=500)
    parser.add_argument("--part", nargs="+", choices=parts, default=list(parts))
    given = parser.parse_args()
    if given.quick:
        given.rounds, given.megabytes, given.no_write = 1, 8, True
    torch.set_num_threads(1)

    def measured(root: Path) -> Iterator[tuple[str, Any]]:
        for part in given.part:
            (root / part).mkdir()
            about = {"cores_busy_with_other_work": outside_load(), "megabytes": given.megabytes}
            yield part, about | parts[part](given.megabytes, given.rounds, root / part)

    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        pieces = measured(Path(folder))
        each("checkpoint", pieces, keep=not given.no_write)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
