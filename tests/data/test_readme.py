"""The commands of docs/preparing-data.md, as they stand there, on a source of each kind that they
name."""

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers
from typer.testing import CliRunner

from elastic_dp import cli
from elastic_dp.config import DataConfig
from elastic_dp.data import read_index

SECTION = (Path(__file__).parents[2] / "docs" / "preparing-data.md").read_text()
COMMANDS = re.findall(r"^elastic-dp (.*)$", SECTION, re.MULTILINE)


@pytest.fixture
def raw(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("raw/table", "raw/books", "raw/photos/cat", "raw/photos/dog", "raw/code"):
        Path(folder).mkdir(parents=True)
    table = pa.table({"id": np.arange(1000), "x": np.arange(1000) / 7})
    pq.write_table(table, "raw/table/a.parquet")
    Path("raw/rows.jsonl").write_text('{"id":1,"x":2.5}\n' * 1000)
    Path("raw/lines.jsonl").write_text(json.dumps({"id": 1, "x": 2.5, "y": "no"}) + "\n")
    Path("raw/books/a.txt").write_text("hello world " * 5000)
    Path("raw/code/a.py").write_text("print()\n" * 1000)
    Path("raw/code/README.md").write_text("no program" * 1000)
    for name in ("cat/1.jpg", "dog/1.jpg"):
        Path(f"raw/photos/{name}").write_bytes(b"an image")
    model = tokenizers.models.WordLevel({"hello": 0, "world": 1, "<|endoftext|>": 2}, "hello")
    small = tokenizers.Tokenizer(model)
    small.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    asked = {"gpt2": small}  # in the place of the hub
    monkeypatch.setattr(tokenizers.Tokenizer, "from_pretrained", lambda name: asked[name])


def test_readme_commands_do_what_they_say(raw):
    assert len(COMMANDS) == 9
    for command in COMMANDS:
        result = CliRunner().invoke(cli.app, shlex.split(command))
        assert result.exit_code == 0, (command, result.output)
    rows = {
        folder.name: read_index(DataConfig(str(folder), micro_batch_size=1)).num_rows
        for folder in Path("shards").iterdir()
    }
    books = 12 * 5000 + 1
    expected = {"table": 1000, "rows": 1000, "lines": 1, "photos": 2}
    assert rows == expected | {"bytes": books // 2049, "gpt2": 10_001 // 2049, "code": 8001 // 2049}


def test_readme_python_runs_as_written(raw, capsys):
    for code in re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL):
        if "elastic_dp.dataprep" in code and "deltalake" not in code:
            exec(code, {})
    said = capsys.readouterr().out
    assert 'shuffle="full"' in said and "100000 1 1" in said


def test_programs_become_shards_by_the_command_of_the_kubernetes_page(tmp_path):
    text = (Path(__file__).parents[2] / "k8s" / "docs" / "clouds.md").read_text()
    (command,) = re.findall(r"`elastic-dp (data convert 'PROGRAMS/[^`]*)`", text)
    words = shlex.split(command)
    source = tmp_path / "python3.11"
    (source / "json").mkdir(parents=True)
    for name in ("abc.py", "json/__init__.py"):
        (source / name).write_text("x = 1\n" * 100)
    (source / "LICENSE.txt").write_text("y" * 500)
    words[2:4] = f"{source}/**/*.py", str(tmp_path / "out")
    result = CliRunner().invoke(cli.app, words)
    assert result.exit_code == 0, result.output
    assert result.output.startswith(f"2 documents of 2 files → {(2 * 600 + 2) // 129} rows")
