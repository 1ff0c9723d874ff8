"""Three rings, imports point inward; the words that mean nothing are not used as names."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "elastic_dp"

# Who may import what of ours; `protocol.messages` is the language everybody speaks.
ALLOWED = {
    "errors": set(),
    "spec": {"errors"},
    "protocol": {"errors", "protocol"},
    "sampling": {"errors", "sampling"},
    "telemetry": {"errors", "telemetry"},
    "data": {"errors", "spec", "sampling", "data"},
    "distributed": {"errors", "distributed"},
    "train": {
        "errors",
        "spec",
        "protocol.messages",
        "sampling",
        "data",
        "distributed",
        "telemetry",
        "train",
    },
    "cluster": {
        *("errors", "spec", "protocol", "sampling", "data", "distributed"),
        *("train", "telemetry", "cluster"),
    },
    "__init__": {"spec", "train", "cluster"},
}

PURE = {"errors", "spec", "protocol", "sampling"}
NEVER_IN_PURE = {
    *("time", "datetime", "random", "threading", "asyncio", "socket", "os", "logging"),
    *("subprocess", "torch", "ray", "pyarrow", "fsspec"),
}
BANNED_NAMES = {"utils", "common", "core", "helpers", "base", "manager", "misc", "types"}


def modules():
    return sorted(ROOT.rglob("*.py"))


def imports(path):
    """(line, dotted name) of everything that `path` imports, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.lineno, node.module


def part_of(path):
    inner = path.relative_to(ROOT)
    return inner.parts[0] if len(inner.parts) > 1 else inner.stem


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_inward(path):
    part = part_of(path)
    for line, name in imports(path):
        pieces = name.split(".")
        where = f"{path.relative_to(ROOT)}:{line} imports {name}"
        if pieces[0] == "elastic_dp":
            allowed = ALLOWED[part]
            ours = pieces[1] if len(pieces) > 1 else "__init__"
            assert ours in allowed or ".".join(pieces[1:3]) in allowed or ours == "errors", where
        elif pieces[0] == "ray":
            assert part == "cluster", where
        elif part in PURE:
            assert pieces[0] not in NEVER_IN_PURE, where
    assert path.stem not in BANNED_NAMES


def test_every_module_says_what_it_does():
    for path in modules():
        tree = ast.parse(path.read_text())
        assert not tree.body or ast.get_docstring(tree), path


def test_no_file_grows_into_a_god():
    for path in modules():
        assert len(path.read_text().splitlines()) <= 500, path


def test_public_names_are_exactly_these():
    import elastic_dp

    assert elastic_dp.__all__ == sorted(elastic_dp.__all__)
    for name in elastic_dp.__all__:
        assert hasattr(elastic_dp, name)
