"""Other loaders packing the documents of `benchmarks.data_packing` while they read them.

    python packing.py RESULT.json SYSTEM FOLDER

Rows of 1,024 tokens per second of each epoch, in order and shuffled; each batch of 64 rows is
copied into a fixed buffer. Rows hold tokens alone: none of these systems makes positions or numbers
of documents here. Each reads the format that its users write, and packs in its own way:

- litdata: chunks of tokens, read in blocks by `TokensLoader`, which drops the end of each chunk.
- Hugging Face datasets: `group_texts` of transformers' run_clm.py in `map`, over a streaming data
  set, with arrays of NumPy; it drops the end of each 1,000 documents. It is written out here, since
  the package does not contain it.
- trl: `pack_dataset(strategy="wrapped")` over the same, in Arrow; the last row of each 1,000
  documents is short.
- Streaming, WebDataset: documents as MDS samples and as .npy members of a tar, laid end to end by a
  loop, since neither packs.
- Ray Data: `map_batches` over Arrow batches, laid end to end; the rest of each batch is dropped.

Shuffled as each does it by default, with a buffer of 10,000 documents where it asks for a size.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import sys
import tarfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

BATCH, LENGTH, EPOCHS, BUFFER = 64, 1_024, 1, 10_000
MAP_BATCH = 1_000  # documents, the default of datasets' `map`
CHUNK = 32 << 20
Tokens = npt.NDArray[np.int32]


def main(result: str, system: str, folder: Path) -> None:
    total = sum(len(document) for path in shards(folder) for document in documents_of(path))
    buffer = np.empty((BATCH, LENGTH), dtype=np.int32)
    speeds: dict[str, list[float]] = {}
    for kind, shuffle in (("in order", False), ("shuffled", True)):
        for epoch in range(1 + EPOCHS):
            begun_at, seen, tokens = time.perf_counter(), 0, 0
            for rows in SYSTEMS[system](folder, shuffle, epoch):
                for row in rows:
                    buffer[seen % BATCH, : len(row)] = row
                    seen += 1
                    tokens += len(row)
            took = time.perf_counter() - begun_at
            assert 0.99 * total < tokens <= total, f"{tokens} of {total} tokens came"
            if epoch:
                speeds.setdefault(kind, []).append(tokens / LENGTH / took)
    Path(result).write_text(json.dumps(speeds))
    os._exit(0)  # its threads need not be waited for


def shards(folder: Path) -> list[str]:
    return sorted(str(path) for path in (folder / "packed").iterdir())


def documents_of(path: str) -> Iterator[Tokens]:
    import pyarrow.parquet as pq

    for batch in pq.ParquetFile(path).iter_batches(1_000, columns=["input_ids"]):
        column = batch.column(0)
        bounds = column.offsets.to_numpy()
        yield from np.split(column.flatten().to_numpy(), (bounds - bounds[0])[1:-1])


def end_to_end(documents: Iterable[Tokens]) -> Iterator[Tokens]:
    """Arrays [rows, LENGTH] of the documents, laid end to end and cut. The last, short row is not
    in them."""
    parts: list[Tokens] = []
    held = 0
    for document in documents:
        parts.append(document)
        held += len(document)
        if held >= BATCH * LENGTH:
            line = np.concatenate(parts)
            used = held // LENGTH * LENGTH
            yield line[:used].reshape(-1, LENGTH)
            parts, held = [line[used:]], held - used
    if held >= LENGTH:
        used = held // LENGTH * LENGTH
        yield np.concatenate(parts)[:used].reshape(-1, LENGTH)


def as_tensors(path: str) -> Iterator[Any]:
    import torch

    for document in documents_of(path):
        yield torch.from_numpy(document.copy())


def litdata(folder: Path, shuffle: bool, seed: int) -> Iterable[Any]:
    from litdata import StreamingDataset, TokensLoader, optimize

    chunks = folder / "litdata"
    if not (chunks / "index.json").exists():
        optimize(
            fn=as_tensors,
            inputs=shards(folder),
            output_dir=str(chunks),
            chunk_bytes=CHUNK,
            num_workers=2,
            item_loader=TokensLoader(),
        )
    rows = StreamingDataset(
        str(chunks),
        item_loader=TokensLoader(block_size=LENGTH),
        shuffle=shuffle,
        drop_last=False,
        seed=seed,
    )
    return ([row] for row in rows)


def mosaicml(folder: Path, shuffle: bool, seed: int) -> Iterable[Tokens]:
    from data_mosaicml import stand_in_for_torchvision

    stand_in_for_torchvision()
    from streaming import MDSWriter, StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    out = folder / "mds"
    if not (out / "index.json").exists():
        columns = {"input_ids": "ndarray:int32"}
        with MDSWriter(out=str(out), columns=columns, size_limit=CHUNK) as writer:
            for document in itertools.chain.from_iterable(map(documents_of, shards(folder))):
                writer.write({"input_ids": np.ascontiguousarray(document)})
    clean_stale_shared_memory()
    dataset = StreamingDataset(local=str(out), shuffle=shuffle, shuffle_seed=seed, batch_size=BATCH)
    return end_to_end(sample["input_ids"] for sample in dataset)


def streamed(folder: Path, shuffle: bool, seed: int) -> Any:
    """The documents as a streaming data set of Hugging Face."""
    os.environ["HF_HUB_OFFLINE"], os.environ["HF_HOME"] = "1", str(folder / "hugging_face")
    from datasets import load_dataset

    dataset = load_dataset("parquet", data_files=shards(folder), split="train", streaming=True)
    return dataset.shuffle(seed=seed, buffer_size=BUFFER) if shuffle else dataset


def group_texts(examples: dict[str, Any]) -> dict[str, Any]:
    line = np.concatenate(examples["input_ids"])
    used = len(line) // LENGTH * LENGTH
    return {"input_ids": list(line[:used].reshape(-1, LENGTH))}


def hugging_face(folder: Path, shuffle: bool, seed: int) -> Iterable[Any]:
    dataset = streamed(folder, shuffle, seed).with_format("numpy")
    packed = dataset.map(group_texts, batched=True, batch_size=MAP_BATCH)
    return (batch["input_ids"] for batch in packed.iter(batch_size=BATCH))


def trl(folder: Path, shuffle: bool, seed: int) -> Iterable[Any]:
    dataset = streamed(folder, shuffle, seed)
    from trl.data_utils import pack_dataset

    packed = pack_dataset(dataset, seq_length=LENGTH, strategy="wrapped").with_format("arrow")
    return map(rows_of, packed.iter(batch_size=BATCH))


def rows_of(batch: Any) -> list[Tokens]:
    column = batch.column("input_ids").combine_chunks()
    bounds = column.offsets.to_numpy()
    return np.split(column.flatten().to_numpy(), (bounds - bounds[0])[1:-1])


def webdataset(folder: Path, shuffle: bool, seed: int) -> Iterable[Tokens]:
    import webdataset as wds

    tars = folder / "tar"
    if not tars.exists():
        aside = folder / "tar.part"
        aside.mkdir()
        for number, path in enumerate(shards(folder)):
            with tarfile.open(aside / f"part-{number}.tar", "w") as tar:
                for place, document in enumerate(documents_of(path)):
                    file = io.BytesIO()
                    np.save(file, document)
                    member = tarfile.TarInfo(f"{number:03}{place:07}.npy")
                    member.size = file.tell()
                    file.seek(0)
                    tar.addfile(member, file)
        aside.rename(tars)
    urls = sorted(str(path) for path in tars.iterdir())
    dataset = wds.WebDataset(urls, shardshuffle=len(urls) if shuffle else False, seed=seed)
    if shuffle:
        dataset = dataset.shuffle(BUFFER)
    return end_to_end(document for (document,) in dataset.decode().to_tuple("npy"))


def ray_data(folder: Path, shuffle: bool, seed: int) -> Iterable[Any]:
    import pyarrow as pa
    import ray

    if not ray.is_initialized():
        ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
        ray.data.DataContext.get_current().enable_progress_bars = False

    def packed(batch: Any) -> Any:
        line = batch.column("input_ids").combine_chunks().flatten()
        bounds = pa.array(np.arange(0, len(line) + 1, LENGTH, dtype=np.int32))
        return pa.table({"input_ids": pa.ListArray.from_arrays(bounds, line)})

    documents = ray.data.read_parquet(str(folder / "packed"), columns=["input_ids"])
    rows = documents.map_batches(packed, batch_size=BUFFER, batch_format="pyarrow")
    options: dict[str, Any] = {}
    if shuffle:
        options = {"local_shuffle_buffer_size": BUFFER, "local_shuffle_seed": seed}
    batches = rows.iter_batches(batch_size=BATCH, batch_format="pyarrow", **options)
    return map(rows_of, batches)


SYSTEMS: dict[str, Callable[[Path, bool, int], Iterable[Any]]] = {
    "litdata": litdata,
    "mosaicml": mosaicml,
    "hugging_face": hugging_face,
    "trl": trl,
    "webdataset": webdataset,
    "ray_data": ray_data,
}


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
