"""Seconds to read an epoch of local shards as training does, to open folders of shards, and to
convert JSON by the command line.

Reading and opening are by `elastic_dp.data.open_data`, in one process: the data set of
`token_rows` in micro-batches of 64 rows for 8 virtual workers, and folders of small files.
"""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import elastic_dp as edp
from benchmarks import token_rows

CASES = {
    "parquet in order": ("read", "parquet", "none"),
    "parquet shuffled": ("read", "parquet", "rows"),
    "arrow in order": ("read", "arrow", "none"),
    "arrow shuffled": ("read", "arrow", "rows"),
    "open 512 files of Parquet": ("open", "parquet"),
    "open 32 MB of tar": ("open", "tar"),
    "convert 32 MB of JSON": ("convert", "jsonl"),
}
VIRTUAL_WORKERS, FILES, ROWS = 8, 8, 25_000  # ROWS of each of FILES, of about 160 bytes
MAIN = "from elastic_dp.cli import main; main()"


def prepare(folder: Path) -> None:
    """Writes what all cases read. What is there already stays."""
    token_rows.write(folder)
    token_rows.many(folder)
    small = folder / "small"
    if small.exists():
        return
    shutil.rmtree(folder / "part", ignore_errors=True)
    for kind, write in (("jsonl", write_json), ("tar", write_tar)):
        (folder / "part" / kind).mkdir(parents=True)
        for number in range(FILES):
            write(folder / f"part/{kind}/part-{number}.{kind}", rows(number))
    (folder / "part/parquet").mkdir()
    import numpy as np

    tokens = np.load(folder / "tokens.npy", mmap_mode="r")
    for number in range(512):
        path = folder / f"part/parquet/part-{number:03}.parquet"
        token_rows.write_parquet(path, tokens[16 * number : 16 * number + 16], 4)
    (folder / "part").rename(small)


def rows(seed: int) -> Iterator[dict[str, Any]]:
    rng = random.Random(seed)
    words = [f"word{n}" for n in range(1000)]
    for number in range(ROWS):
        text = ", ".join(rng.choices(words, k=12))
        quoted = f'{text} "so" they said' if number % 20 == 0 else text
        yield {"id": seed * ROWS + number, "x": rng.random(), "text": quoted, "label": number % 10}


def write_json(path: Path, lines: Iterator[dict[str, Any]]) -> None:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines), "utf-8")


def write_tar(path: Path, lines: Iterator[dict[str, Any]]) -> None:
    """Samples of a text of eight rows and a class."""
    with tarfile.open(path, "w") as file:
        for number, line in enumerate(lines):
            if number % 8:
                continue
            for ending, text in (("txt", line["text"] * 8), ("cls", str(line["label"]))):
                info = tarfile.TarInfo(f"{line['id']:08}.{ending}")
                info.size = len(text)
                file.addfile(info, io.BytesIO(text.encode()))


def measure(shards: Path, kind: str, name: str, shuffle: str = "rows") -> Callable[[], float]:
    if kind == "convert":
        return lambda: convert(shards / "small" / name)
    from elastic_dp.data import open_data

    if kind == "open":
        config = edp.DataConfig(str(shards / "small" / name), micro_batch_size=8)

        def opened() -> float:
            begun_at = time.perf_counter()
            data = open_data(config, virtual_workers=VIRTUAL_WORKERS)
            seconds = time.perf_counter() - begun_at
            data.close()
            return seconds

        return opened
    config = edp.DataConfig(
        str(shards / "many" / name),
        micro_batch_size=token_rows.BATCH,
        shuffle=shuffle,  # type: ignore[arg-type]
        epochs=1,
        seed=1,
    )
    with_index = open_data(config, virtual_workers=VIRTUAL_WORKERS)
    index = with_index.index
    with_index.close()

    def epoch() -> float:
        data = open_data(config, virtual_workers=VIRTUAL_WORKERS, index=index)
        begun_at = time.perf_counter()
        count = take_all(data)
        seconds = time.perf_counter() - begun_at
        data.close()
        assert count == token_rows.MANY_ROWS, f"{count} rows came"
        return seconds

    return epoch


def take_all(data: Any) -> int:
    """How many rows came, as a worker takes them that runs all virtual workers."""
    data.read_ahead(1, range(VIRTUAL_WORKERS))
    return sum(
        len(data.batch(step, v)["tokens"])
        for step in range(1, data.steps_per_epoch + 1)
        for v in range(VIRTUAL_WORKERS)
    )


def convert(source: Path) -> float:
    """Seconds of the whole process, imports included. As in an installed package, modules are
    compiled once: the first call does it."""
    destination = Path("converted")  # in the folder of this side
    shutil.rmtree(destination, ignore_errors=True)
    environment = {n: v for n, v in os.environ.items() if n != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = str(Path("bytecode").absolute())
    command = [sys.executable, "-c", MAIN, "data", "convert", str(source), str(destination)]
    begun_at = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
    return time.perf_counter() - begun_at


def run(folder: str, name: str) -> None:
    from benchmarks.paired import serve

    kind = CASES[name][0]
    once = measure(Path(folder).parent.parent / "shards", *CASES[name])
    times = 1 if kind == "convert" else 2
    serve(folder, lambda number: {kind: [once() for _ in range(times)]})


if __name__ == "__main__":
    run(*sys.argv[1:])
