"""How trl and Hugging Face's own scripts make rows of the documents of `benchmarks.packing_waste`.

    python packing_hugging_face.py RESULT.json FOLDER LENGTH

Every token of document i is the number i + 1, so the rows tell what became of each document. For
each way RESULT has the path of an .npz file with the rows: `tokens`, end to end without padding,
and `offsets`; and `padding`, the tokens that a batch has besides.

- trl's `pack_dataset`, with each of its strategies. A tensor of its rows is padded to LENGTH.
- `group_texts` of transformers' run_clm.py, in batches of 1,000 documents, as `map` has them: the
  rest of each batch is dropped. It is written out here, since the package does not contain it.
- `DataCollatorForLanguageModeling`: documents truncated to LENGTH, batches of 8 in a random order,
  each padded to its longest.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

BATCH, MAP_BATCH = 8, 1000


def main(result: str, folder: Path, length: int) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["HF_HOME"] = str(folder / "hugging_face")
    from datasets import load_dataset
    from trl.data_utils import pack_dataset

    files = sorted(str(path) for path in (folder / "documents").iterdir())
    dataset = load_dataset("parquet", data_files=files, split="train")
    documents = rows_of(dataset)
    ways: dict[str, tuple[list[Any], int | None]] = {}
    for strategy in ("bfd", "bfd_split", "wrapped"):
        packed = pack_dataset(dataset, seq_length=length, strategy=strategy)
        ways[f"trl, {strategy}"] = rows_of(packed), None
    ways["run_clm, group_texts"] = grouped(documents, length), None
    ways["DataCollatorForLanguageModeling"] = collated(documents, length)
    found = {}
    for number, (name, (rows, padding)) in enumerate(ways.items()):
        path = folder / f"rows-{number}.npz"
        offsets = np.cumsum([0, *map(len, rows)])
        tokens = np.concatenate(rows)
        np.savez(path, tokens=tokens, offsets=offsets)
        padded = len(rows) * length - len(tokens) if padding is None else padding
        found[name] = {"path": str(path), "padding": int(padded)}
    Path(result).write_text(json.dumps(found))


def rows_of(dataset: Any) -> list[Any]:
    column = dataset.with_format("arrow")[:]["input_ids"].combine_chunks()
    tokens, bounds = column.flatten().to_numpy(), column.offsets.to_numpy()
    return np.split(tokens, (bounds - bounds[0])[1:-1])


def grouped(documents: list[Any], length: int) -> list[Any]:
    rows = []
    for first in range(0, len(documents), MAP_BATCH):
        line = np.concatenate(documents[first : first + MAP_BATCH])
        rows += [line[i : i + length] for i in range(0, len(line) // length * length, length)]
    return rows


def collated(documents: list[Any], length: int) -> tuple[list[Any], int]:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerFast

    made = Tokenizer(WordLevel({"[PAD]": 0}, unk_token="[PAD]"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]")
    collate = DataCollatorForLanguageModeling(tokenizer, mlm=False, return_tensors="np")
    rows = [document[:length] for document in documents if len(document)]
    order = np.random.default_rng(0).permutation(len(rows))
    padding = 0
    for first in range(0, len(order), BATCH):
        batch = collate([{"input_ids": rows[i].tolist()} for i in order[first : first + BATCH]])
        padding += int((batch["input_ids"] == 0).sum())
    return rows, padding


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
