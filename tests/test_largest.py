"""The list of the largest classes, functions and files, and the reasons that the docs give."""

from pathlib import Path

import pytest

from tests import largest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "architecture" / "index.md").read_text()


def test_largest_command_prints_the_first_of_each_kind(capsys):
    largest.main(["--top", "2"])
    said = capsys.readouterr().out
    titles = ["attributes of a class", "lines of a function", "lines of a file"]
    blocks = [block.splitlines() for block in said.strip().split("\n\n")]
    assert [block[0] for block in blocks] == titles
    for _, first, second in blocks:
        assert int(first.split()[0]) >= int(second.split()[0]) > 10


@pytest.mark.parametrize("kind", ["classes", "functions", "files"])
def test_first_five_of_each_kind_have_a_reason_in_the_docs(kind):
    missing = []
    for _, name in getattr(largest, kind)()[:5]:
        path, _, inner = name.partition(": ")
        shown = f"| `{inner}` (`{path}`) |" if inner else f"| `{path}` |"
        missing += [] if shown in PAGE else [name]
    assert not missing, "cut them in two, or say why in docs/architecture/index.md"
