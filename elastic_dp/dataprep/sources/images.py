"""A folder of images with a subfolder per class. Columns: image (the bytes of the file), label
(int32), path.

A label is the index of the class name in alphabetical order. The schema's metadata has the names
under "classes".
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pyarrow as pa

from elastic_dp.data.discovery.partitions import Partitions
from elastic_dp.dataprep.sources.row_stream import Rows, choose
from elastic_dp.dataprep.sources.source_files import Files, reading
from elastic_dp.errors import DataError
from elastic_dp.storage import redact_url

BATCH_BYTES = 8 << 20
BATCH_FILES = 64  # read at once


def open_images(files: Files, columns: list[str] | None, partitions: Partitions) -> Rows:
    """`partitions` is ignored: folders are classes."""
    flat = [name for name in files.names if "/" not in name]
    if flat:
        raise DataError(
            f"{flat[0]} is not in a subfolder; an image folder has one subfolder for each class, "
            "and no other files"
        )
    classes = sorted({name.split("/")[0] for name in files.names})
    label = {name: number for number, name in enumerate(classes)}
    schema = pa.schema(
        [("image", pa.binary()), ("label", pa.int32()), ("path", pa.string())],
        metadata={"classes": json.dumps(classes)},
    )
    chosen = choose(schema, columns, redact_url(files.root))

    def batches() -> Iterator[pa.RecordBatch]:
        for names in _batches_of_names(files):
            with reading(f"{names[0]} … {names[-1]}", files.options):
                # Not `cat`, which takes "[" in a name for a pattern.
                content = files.system.cat_ranges(
                    [files.path(name) for name in names], None, None, on_error="raise"
                )
            for name in names if files.is_local else ():  # a store gives one version of an object
                files.refuse_changed(name)
            labels = [label[name.split("/")[0]] for name in names]
            yield pa.RecordBatch.from_arrays(
                [pa.array(content, pa.binary()), pa.array(labels, pa.int32()), pa.array(names)],
                schema=schema,
            ).select(chosen.names)

    return Rows(chosen, batches)


def _batches_of_names(files: Files) -> Iterator[list[str]]:
    names: list[str] = []
    total = 0
    for name, size in zip(files.names, files.sizes, strict=True):
        if names and (total + size > BATCH_BYTES or len(names) == BATCH_FILES):
            yield names
            names, total = [], 0
        names.append(name)
        total += size
    yield names
