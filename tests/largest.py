"""The largest classes (by attributes), functions and files (by lines): `python -m tests.largest
[--top 10]`."""

import argparse
import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.source_trees import tree_of

ROOT = Path(__file__).parent.parent / "elastic_dp"


def attributes(cls: ast.ClassDef) -> set[str]:
    """Fields that the class declares, and those that its methods assign on `self`."""
    declared = {
        node.target.id
        for node in cls.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    assigned = {
        node.attr
        for node in ast.walk(cls)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }
    return declared | assigned


def nodes(kind: type | tuple[type, ...]) -> Iterator[tuple[str, ast.AST]]:
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, kind):
                yield str(path.relative_to(ROOT)), node


def classes() -> list[tuple[int, str]]:
    found = ((len(attributes(c)), f"{path}: {c.name}") for path, c in nodes(ast.ClassDef))  # type: ignore[attr-defined, arg-type]
    return sorted(found, reverse=True)


def functions() -> list[tuple[int, str]]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    found = ((f.end_lineno - f.lineno + 1, f"{path}: {f.name}") for path, f in nodes(kinds))  # type: ignore[attr-defined]
    return sorted(found, reverse=True)


def files() -> list[tuple[int, str]]:
    lines = (
        (len(p.read_text().splitlines()), str(p.relative_to(ROOT))) for p in ROOT.rglob("*.py")
    )
    return sorted(lines, reverse=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--top", type=int, default=10)
    top = parser.parse_args(arguments).top
    for title, found in (
        ("attributes of a class", classes()),
        ("lines of a function", functions()),
        ("lines of a file", files()),
    ):
        print(f"\n{title}")
        for size, name in found[:top]:
            print(f"  {size:5}  {name}")


if __name__ == "__main__":
    main()
