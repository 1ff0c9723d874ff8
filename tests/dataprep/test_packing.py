"""Documents become rows of tokens, and no token is lost or repeated."""

import sys

import hypothesis.strategies as st
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers
from hypothesis import given, settings

from elastic_dp.dataprep import convert, readers, token_packing
from elastic_dp.dataprep.token_packing import ByteTokenizer, HuggingFaceTokenizer, Packing
from elastic_dp.errors import DataError


def read(folder):
    (shard,) = folder.iterdir()
    if shard.suffix == ".parquet":
        return pq.read_table(shard)
    return pa.ipc.open_file(shard.read_bytes()).read_all()


def test_packing_by_hand(tmp_path):
    """ "abc", end, "de", end, "f", end: 9 tokens, rows of 4, one token over."""
    (tmp_path / "a.jsonl").write_text(
        '{"text": "abc"}\n{"text": null}\n{"text": "de"}\n{"text": "f"}\n'
    )
    made = convert(str(tmp_path / "a.jsonl"), str(tmp_path / "out"), tokenizer="bytes", pack=4)
    table = read(tmp_path / "out")
    assert table["tokens"].to_pylist() == [[97, 98, 99, 256], [100, 101, 256, 102]]
    assert table.schema.field("tokens").type == pa.list_(pa.uint16(), 4)
    assert (made.rows, made.dropped_tokens) == (2, 1)


@settings(max_examples=50)
@given(st.lists(st.text(max_size=30), min_size=1), st.integers(1, 40), st.integers(1, 7))
def test_packing_loses_and_repeats_nothing(texts, length, piece_chars):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_packing, "PIECE_CHARS", piece_chars)
        pieces = [piece for text in texts for piece in token_packing.pieces(text)]
    packing = Packing(ByteTokenizer(), length)
    rows = [row for batch in packing.batches(iter(pieces)) for row in batch["tokens"].to_pylist()]
    line = [token for text in texts for token in (*text.encode(), 256)]
    assert packing.dropped_tokens == len(line) % length
    assert rows == [line[i : i + length] for i in range(0, len(line) - length + 1, length)]


def test_text_files_are_documents_of_any_length(tmp_path, monkeypatch):
    monkeypatch.setattr(token_packing, "PIECE_CHARS", 10)
    monkeypatch.setattr(readers, "PIECE_CHARS", 10)
    texts = ["ä\r\nö" * 50, "no end of line " * 9, ""]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_bytes(text.encode())
    convert(str(tmp_path), str(tmp_path / "out"), tokenizer="bytes", pack=3)
    line = [token for text in texts for token in (*text.encode(), 256)]
    assert read(tmp_path / "out")["tokens"].to_pylist() == [
        line[i : i + 3] for i in range(0, len(line) - 2, 3)
    ]


def test_the_tokenizers_library(tmp_path):
    vocabulary = {"<unk>": 0, "hello": 1, "world": 2, "</s>": 70_000}
    model = tokenizers.models.WordLevel(vocabulary, unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.enable_padding(length=50)
    tokenizer.enable_truncation(1)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.jsonl").write_text('{"text": "hello world"}\n{"text": "world what"}\n')
    source, name = str(tmp_path / "a.jsonl"), str(tmp_path)
    convert(source, str(tmp_path / "out"), tokenizer=name, pack=3)
    table = read(tmp_path / "out")
    assert table["tokens"].to_pylist() == [[1, 2, 70_000], [2, 0, 70_000]]
    assert table.schema.field("tokens").type.value_type == pa.int32()
    with pytest.raises(DataError, match=r"no token <eos>; name the one.*--end-of-text"):
        convert(source, str(tmp_path / "no"), tokenizer=name, pack=3, end_of_text="<eos>")


def test_a_missing_extra_is_named(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("text")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(DataError, match=r"pip install 'elastic_dp\[text\]'"):
        convert(str(tmp_path), str(tmp_path / "out"), tokenizer="gpt2", pack=9)


def test_any_object_of_that_shape_is_a_tokenizer(tmp_path):
    class Words:
        vocabulary, end_of_text = 1000, 999

        def encode(self, texts):
            return [[len(word) for word in text.split()] for text in texts]

    (tmp_path / "a.jsonl").write_text(
        '{"id": 1, "body": "one three"}\n{"id": 2, "body": "seven"}\n'
    )
    source, target = str(tmp_path / "a.jsonl"), str(tmp_path / "out")
    convert(source, target, tokenizer=Words(), pack=5, columns=["body"])
    assert read(tmp_path / "out")["tokens"].to_pylist() == [[3, 5, 999, 5, 999]]


class _Library:
    """The part of the `tokenizers` library that the adapter uses."""

    def __init__(self):
        self.called = []

    def __getattr__(self, name):
        return lambda: self.called.append(name)

    def get_vocab(self, with_added_tokens):
        return {"a": 3, "<|endoftext|>": 9}

    def token_to_id(self, token):
        return self.get_vocab(True).get(token)


def test_the_adapter_turns_off_what_would_change_the_text():
    library = _Library()
    tokenizer = HuggingFaceTokenizer(library)
    assert (tokenizer.vocabulary, tokenizer.end_of_text) == (10, 9)
    assert library.called == ["no_padding", "no_truncation"]


def test_a_glob_names_files_of_any_ending_as_documents(tmp_path):
    for name in ("a.py", "b/c.py", "README.md"):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_text("x")
    made = convert(f"{tmp_path}/in/**/*.py", str(tmp_path / "out"), tokenizer="bytes", pack=2)
    assert (made.rows_in, made.rows, made.files) == (2, 2, 2)
    with pytest.raises(DataError, match="a glob such as"):
        convert(str(tmp_path / "in"), str(tmp_path / "no"), tokenizer="bytes", pack=2)
