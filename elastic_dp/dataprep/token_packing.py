"""Packs documents into rows of exactly N tokens: documents are joined, with an end-of-text token
after each, and cut every N tokens.

No token is padding. Only the tokens after the last complete row, fewer than N, are dropped and
counted. Rows are fixed-size lists of uint16, or of int32 for larger vocabularies.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from elastic_dp.errors import DataError

PIECE_CHARS = 1 << 20
BATCH_CHARS = 1 << 18  # tokenized at once; each token is a Python object for a moment
BATCH_PIECES = 1024
_ENDS_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")


Piece = tuple[str, bool]  # text, whether it ends the document


class Tokenizer(Protocol):
    """Turns texts into token ids. `encode` adds no special tokens."""

    vocabulary: int  # ids are below this
    end_of_text: int

    def encode(self, texts: list[str]) -> Sequence[Sequence[int] | npt.NDArray[Any]]: ...


class ByteTokenizer:
    """Tokens are the bytes of UTF-8, and 256 for the end of a text."""

    vocabulary = 257
    end_of_text = 256

    def encode(self, texts: list[str]) -> list[npt.NDArray[np.uint8]]:
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]


class HuggingFaceTokenizer:
    """A tokenizer of the `tokenizers` library. `end_of_text`: the name of its token; None: the
    usual names are tried."""

    def __init__(self, tokenizer: Any, end_of_text: str | None = None) -> None:
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self._tokenizer = tokenizer
        self.vocabulary = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        tried = _ENDS_OF_TEXT if end_of_text is None else (end_of_text,)
        found = [i for token in tried if (i := tokenizer.token_to_id(token)) is not None]
        if not found:
            raise DataError(
                f"the tokenizer has no token {', '.join(tried)}; name the one that ends a text "
                "(--end-of-text)"
            )
        self.end_of_text: int = found[0]

    def encode(self, texts: list[str]) -> list[Sequence[int]]:
        return [e.ids for e in self._tokenizer.encode_batch(texts, add_special_tokens=False)]


def open_tokenizer(name: str, end_of_text: str | None = None) -> Tokenizer:
    """`name`: "bytes", a tokenizer.json, a folder that has one, or a name on the Hugging Face hub.
    Raises DataError if it cannot be loaded."""
    if name == "bytes":
        return ByteTokenizer()
    try:
        from tokenizers import Tokenizer as Loaded
    except ImportError as error:
        raise DataError(
            f"the tokenizer {name!r} needs the package tokenizers: pip install 'elastic_dp[text]'"
        ) from error
    path = Path(name) / "tokenizer.json" if Path(name).is_dir() else Path(name)
    try:
        loaded = Loaded.from_file(str(path)) if path.is_file() else Loaded.from_pretrained(name)
    except Exception as error:  # the library raises plain Exception
        raise DataError(f"cannot load the tokenizer {name!r}: {error}") from error
    return HuggingFaceTokenizer(loaded, end_of_text)


class Packing:
    """Packs documents in one pass. `length`: tokens of a row. `dropped_tokens` is set when
    `batches` has ended."""

    def __init__(self, tokenizer: Tokenizer, length: int) -> None:
        if length < 1:
            raise DataError(f"pack is {length}, must be at least 1 token")
        self.dropped_tokens = 0
        self._tokenizer, self._length = tokenizer, length
        self._kind = np.uint16 if tokenizer.vocabulary <= 1 << 16 else np.int32
        items = pa.list_(pa.from_numpy_dtype(self._kind), length)
        self.schema = pa.schema([pa.field("tokens", items, nullable=False)])

    def batches(self, documents: Iterable[Piece]) -> Iterator[pa.RecordBatch]:
        rest = np.empty(0, self._kind)
        for pieces in _grouped(documents):
            tokens = np.concatenate([rest, *self._encode(pieces)])
            whole = len(tokens) // self._length * self._length
            rest = tokens[whole:]
            if whole:
                flat = pa.array(tokens[:whole])
                rows = pa.FixedSizeListArray.from_arrays(flat, self._length)
                yield pa.RecordBatch.from_arrays(
                    [rows.cast(self.schema.field(0).type)], schema=self.schema
                )
        self.dropped_tokens = len(rest)

    def _encode(self, pieces: list[tuple[str, bool]]) -> Iterator[npt.NDArray[Any]]:
        end = np.array([self._tokenizer.end_of_text], self._kind)
        encoded = self._tokenizer.encode([text for text, _ in pieces])
        for ids, (_, last) in zip(encoded, pieces, strict=True):
            yield np.asarray(ids, self._kind)
            if last:
                yield end


def _grouped(documents: Iterable[Piece]) -> Iterator[list[Piece]]:
    group: list[Piece] = []
    chars = 0
    for piece in documents:
        group.append(piece)
        chars += len(piece[0])
        if chars >= BATCH_CHARS or len(group) == BATCH_PIECES:
            yield group
            group, chars = [], 0
    if group:
        yield group


def pieces(text: str) -> Iterator[Piece]:
    """Cuts a document. A piece ends at a line end if possible, since a tokenizer may merge
    characters across any other cut."""
    start = 0
    while len(text) - start > PIECE_CHARS:
        end = text.rfind("\n", start, start + PIECE_CHARS) + 1 or start + PIECE_CHARS
        yield text[start:end], False
        start = end
    yield text[start:], True
