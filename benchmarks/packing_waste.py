"""How many tokens packing wastes, beside trl and Hugging Face's own scripts on the same documents.

    python -m benchmarks.packing_waste [--quick]

Four sets of documents: lengths drawn evenly, from a log-normal distribution with the long tail of
web text, and as short as turns of a chat, with fixed seeds; and the source files of Python's
standard library, split into words, spaces and signs. Rows have 2,048 tokens. Of each way of making
rows:

- padding: tokens of the batches that are no token of a document, for each token of a document;
- dropped: tokens of documents that are in no row;
- cut: documents that would fit into one row and are not whole in one.

Beside them, documents that are not packed: cut at 2,048 tokens, and each micro-batch of 8 padded to
its longest, shuffled or with `group_by_length`. These numbers do not depend on the machine. Ours
are counted in what `open_data` gives for an epoch. The interpreter that has `trl` and `datasets`,
without torch if you like: `TRL_PYTHON`.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks import peers, report
from elastic_dp.config import DataConfig
from elastic_dp.data import open_data

LENGTH = 2048
DOCUMENTS, QUICK_DOCUMENTS = 10_000, 1_000
VIRTUAL_WORKERS, BATCH, ROW_GROUP = 8, 4, 1_000
PADDED_BATCH = 8  # documents, where they are padded
Ints = npt.NDArray[np.int64]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.packing_waste")
    report.add_quick(parser)
    given = parser.parse_args(arguments)
    count = QUICK_DOCUMENTS if given.quick else DOCUMENTS
    found = report.each("packing_waste", measured(count, given.quick), keep=not given.quick)
    if given.quick:
        return 0
    return report.exit_code(
        {
            f"ours wastes no more than {name}, {documents}": no_more(each, name)
            for documents, each in found.items()
            for name in each["ways"]
            if not name.startswith("ours") and isinstance(each["ways"][name], dict)
        }
    )


def no_more(found: dict[str, Any], peer: str) -> bool:
    """Whether ours, which has every token, pads no more tokens than the peer pads and drops."""
    ours, theirs = (found["ways"][name] for name in ("ours, tail=short", peer))
    wasted = [one["padding"] + one["dropped"] for one in (ours, theirs)]
    return bool(wasted[0] <= wasted[1])


def measured(count: int, quick: bool) -> Iterator[tuple[str, Any]]:
    for name, lengths in kinds_of_documents(count).items():
        with tempfile.TemporaryDirectory() as folder:
            yield name, compare(Path(folder), lengths[: count if quick else None])


def kinds_of_documents(count: int) -> dict[str, Ints]:
    """The lengths of documents of each kind."""
    rng = np.random.default_rng(0)
    web = rng.lognormal(np.log(500), 1.2, count)
    chat = rng.lognormal(np.log(120), 0.8, count)
    return {
        "even, 1 to 4,096 tokens": rng.integers(1, 2 * LENGTH, count, endpoint=True),
        "web text, log-normal, median 500": np.clip(web, 1, 100_000).astype(np.int64),
        "chat, log-normal, median 120": np.clip(chat, 1, LENGTH).astype(np.int64),
        "source files of Python": source_files(),
    }


def source_files() -> Ints:
    library = Path(sysconfig.get_paths()["stdlib"])
    files = [p for p in sorted(library.rglob("*.py")) if "site-packages" not in p.parts]
    token = re.compile(r"\w+|\s+|[^\w\s]")
    texts = (path.read_text("utf-8", errors="replace") for path in files)
    return np.array([len(token.findall(text)) for text in texts], np.int64)


def compare(folder: Path, lengths: Ints) -> dict[str, Any]:
    (folder / "documents").mkdir()
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    tokens = np.repeat(np.arange(1, len(lengths) + 1, dtype=np.int32), lengths)
    table = pa.table({"input_ids": pa.ListArray.from_arrays(offsets, tokens)})
    pq.write_table(table, folder / "documents/0.parquet", row_group_size=ROW_GROUP)
    ways: dict[str, Any] = {}
    for tail in ("short", "drop"):
        ways[f"ours, tail={tail}"] = waste(lengths, *ours(folder / "documents", tail))
    python = os.environ.get("TRL_PYTHON", sys.executable)
    script = "packing_hugging_face.py"
    answer = peers.run(python, script, str(folder), str(LENGTH), timeout_s=500.0)
    if not isinstance(answer, dict):
        ways["trl and Hugging Face"] = answer
    else:
        for name, each in answer.items():
            with np.load(each["path"]) as rows:
                ways[name] = waste(lengths, rows["tokens"], rows["offsets"], each["padding"])
    total = int(lengths.sum())
    return {
        "documents": len(lengths),
        "tokens": total,
        "longer than a row": int((lengths > LENGTH).sum()),
        "ways": ways,
        "padded": {
            "shuffled": padded(folder / "documents", False, total),
            "group_by_length": padded(folder / "documents", True, total),
        },
    }


def ours(folder: Path, tail: Any) -> tuple[Ints, Ints, int]:
    """The tokens of all rows of an epoch, where each row begins, and the number of padded ones."""
    config = DataConfig(str(folder), pack=LENGTH, micro_batch_size=BATCH, tail=tail, epochs=1)
    data = open_data(config, virtual_workers=VIRTUAL_WORKERS)
    rows, padding = [], 0
    for step in range(1, data.steps_per_epoch + 1):
        for v in range(VIRTUAL_WORKERS):
            if not data.rows(step, v):
                continue
            batch = data.batch(step, v)
            here = (batch["document_ids"] >= 0).numpy()
            padding += int((~here).sum())
            tokens = batch["input_ids"].numpy()
            rows += [row[kept] for row, kept in zip(tokens, here, strict=True)]
    data.close()
    return np.concatenate(rows).astype(np.int64), np.cumsum([0, *map(len, rows)]), padding


def padded(folder: Path, by_length: bool, total: int) -> dict[str, Any]:
    """Documents cut at LENGTH, each micro-batch of 8 padded to its longest."""
    config = DataConfig(
        str(folder),
        micro_batch_size=PADDED_BATCH,
        group_by_length="input_ids" if by_length else None,
        collate_fn=lengths_of,
        tail="short",
        epochs=1,
    )
    data = open_data(config, virtual_workers=VIRTUAL_WORKERS)
    rows = padding = 0
    for step in range(1, data.steps_per_epoch + 1):
        for v in range(VIRTUAL_WORKERS):
            if data.rows(step, v):
                lengths = data.batch(step, v)
                rows += len(lengths)
                padding += max(lengths) * len(lengths) - sum(lengths)
    data.close()
    return {
        "rows": rows,
        "padding": padding,
        "padding_percent": round(100 * padding / total, 3),
    }


def lengths_of(batch: dict[str, Any]) -> list[int]:
    return [min(len(row), LENGTH) for row in batch["input_ids"]]


def waste(lengths: Ints, tokens: Ints, offsets: Ints, padding: int) -> dict[str, Any]:
    seen = np.bincount(tokens - 1, minlength=len(lengths))
    assert (seen <= lengths).all(), "a token came twice"
    begins = np.union1d(offsets[:-1], np.flatnonzero(np.diff(tokens)) + 1)  # of parts of documents
    row = np.searchsorted(offsets, begins, side="right")
    pairs = np.unique(np.stack([tokens[begins] - 1, row]), axis=1)
    rows_of = np.bincount(pairs[0], minlength=len(lengths))
    whole = (seen == lengths) & (rows_of <= 1)
    total = int(lengths.sum())
    dropped = int((lengths - seen).sum())
    return {
        "rows": len(offsets) - 1,
        "padding": padding,
        "padding_percent": round(100 * padding / total, 3),
        "dropped": dropped,
        "dropped_percent": round(100 * dropped / total, 3),
        "cut": int((~whole & (lengths <= LENGTH)).sum()),
    }


if __name__ == "__main__":
    sys.exit(main())
