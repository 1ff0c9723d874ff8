"""`index.json` of litdata's optimized data sets: what the chunks hold, which do not say it
themselves.

`config` has the serializer of each leaf of a sample (`data_format`), how leaves form a sample
(`data_spec`, a pytree of PyTorch as JSON), and how chunks are compressed or encrypted. `chunks` has
the name, the number of items and of bytes of each chunk. It is written last.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from elastic_dp.errors import DataError

INDEX = "index.json"
_CHUNK = re.compile(r"(?:.*/)?chunk-\d+-\d+(\.[^/]+)?\.bin")
_LOADERS = (None, "PyTreeLoader", "TokensLoader")
_KEYED = ("builtins.dict", "collections.OrderedDict")
_PLACED = ("builtins.list", "builtins.tuple")
ALONE = "value"  # the column of a sample that is neither a dict, a list nor a tuple
TOKENS = "input_ids"  # the column of documents that were written for a TokensLoader

# Of a sample: the number of a leaf, or (name, tree) of each part
Tree = int | tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class ChunkFacts:
    """What the index says of a chunk. `nbytes`: decompressed, and in older versions of litdata
    without the header. `tokens`: their number; None if it has none."""

    items: int
    nbytes: int
    tokens: int | None

    def sizes(self) -> tuple[int, int]:
        """The bytes that the chunk may have."""
        return self.nbytes, self.nbytes + 4 * (self.items + 2)


@dataclass(frozen=True)
class SampleLayout:
    """How samples are stored. `serializers`: of each leaf. `types`: what litdata noted of a
    column's values, for leaves of JSON. `zstd`: what is compressed: "", "chunk", "batch" or
    "sample"."""

    serializers: tuple[str, ...]
    tree: Tree
    types: Mapping[str, Any] = field(default_factory=dict)
    zstd: str = ""
    is_tokens: bool = False
    may_be_arrow: bool = False

    def to_bytes(self) -> bytes:
        return json.dumps(vars(self), sort_keys=True).encode()

    @classmethod
    def from_bytes(cls, content: bytes) -> SampleLayout:
        found = json.loads(content)
        found["tree"] = _as_tuples(found["tree"])
        return cls(**found | {"serializers": tuple(found["serializers"])})


@dataclass(frozen=True)
class LitDataIndex:
    layout: SampleLayout
    chunks: Mapping[str, ChunkFacts]  # by the names of files

    @classmethod
    def of(cls, content: bytes, name: str) -> LitDataIndex:
        """Raises DataError if it is no such index, or if chunks cannot be read as it says."""
        try:
            found = json.loads(content)
            config, chunks = found["config"], found["chunks"]
            _refuse_config(config, name)
            facts = {str(chunk["filename"]): _facts(chunk) for chunk in chunks}
            if len(facts) != len(chunks):
                raise ValueError("it names a chunk twice")
            loader = config.get("item_loader")
            has_tokens = any(one.tokens is not None for one in facts.values())
            is_tokens = loader == "TokensLoader" or (loader is None and has_tokens)
            return cls(_layout(config, name, is_tokens=is_tokens), facts)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DataError(f"{name} is not an index of litdata's chunks: {error!r}") from None


def is_chunk(path: str) -> bool:
    return _CHUNK.fullmatch(path) is not None


def is_packed(path: str) -> bool:
    """Whether the chunk's name says that it is compressed as a whole."""
    found = _CHUNK.fullmatch(path)
    return found is not None and found[1] is not None


def _facts(chunk: Mapping[str, Any]) -> ChunkFacts:
    tokens = chunk.get("dim")
    return ChunkFacts(
        int(chunk["chunk_size"]), int(chunk["chunk_bytes"]), None if tokens is None else int(tokens)
    )


def _refuse_config(config: Mapping[str, Any], name: str) -> None:
    if config.get("encryption") is not None:
        raise DataError(
            f"{name} says that the chunks are encrypted, and they are not decrypted here; write "
            "them without encryption"
        )
    if (loader := config.get("item_loader")) not in _LOADERS:
        raise DataError(
            f"{name} says that the chunks are of the item loader {loader!r}, which is not read; "
            "PyTreeLoader and TokensLoader are"
        )
    codec = config.get("compression")
    if codec is not None and str(codec).partition(":")[0] != "zstd":
        raise DataError(
            f"{name} says that the chunks are compressed by {codec!r}, and only zstd is read"
        )


def _layout(config: Mapping[str, Any], name: str, *, is_tokens: bool) -> SampleLayout:
    serializers = tuple(map(str, config["data_format"]))
    version, spec = json.loads(config["data_spec"])
    if version != 1:
        raise ValueError(f"its data_spec has version {version!r}")
    leaves: list[int] = []
    tree = _tree(spec, leaves, name)
    if len(leaves) != len(serializers) or not leaves:
        raise ValueError("its data_spec and data_format have different numbers of leaves")
    level = ""
    if config.get("compression") is not None:
        level = str(config.get("compression_level") or "chunk")
        if level not in ("chunk", "batch", "sample"):
            raise ValueError(f"compression_level {level!r}")
    if is_tokens:
        if len(leaves) > 1:
            raise ValueError("the tokens of a TokensLoader are one array")
        tree = ((TOKENS, 0),)
    elif isinstance(tree, int):
        tree = ((ALONE, 0),)
    types = config.get("types")
    types = types if isinstance(types, dict) and "json" in serializers else {}
    return SampleLayout(serializers, tree, types, level, is_tokens, "types" in config)


def _tree(spec: Mapping[str, Any], leaves: list[int], name: str) -> Tree:
    kind, children = spec["type"], spec["children_spec"]
    if kind is None:
        leaves.append(len(leaves))
        return leaves[-1]
    if kind in _KEYED:
        keys = [str(key) for key in json.loads(spec["context"])]
    elif kind in _PLACED:
        keys = [str(number) for number in range(len(children))]
    else:
        raise DataError(
            f"{name} says that samples hold a {kind}, which is not read; write dicts, lists or "
            "tuples"
        )
    if len(set(keys)) != len(children) or len(keys) != len(children):
        raise ValueError("the keys of its data_spec do not fit")
    return tuple(
        (key, _tree(child, leaves, name)) for key, child in zip(keys, children, strict=True)
    )


def _as_tuples(tree: Any) -> Tree:
    if isinstance(tree, int):
        return tree
    return tuple((name, _as_tuples(part)) for name, part in tree)
