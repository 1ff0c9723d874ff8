"""What the tests of sources look at, read once for all tests of a process: the syntax trees of the
package's modules, and the names, docstrings and imports of all Python files."""

import ast
import functools
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCES = ("elastic_dp", "tests", "benchmarks", "jobs", "docs")
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@dataclass
class Sources:
    """`names` and `docstrings`: each with a place where it stands. `imports`: what each file
    imports."""

    names: dict[str, str] = field(default_factory=dict)
    docstrings: dict[str, str] = field(default_factory=dict)
    imports: dict[Path, set[str]] = field(default_factory=dict)


@functools.cache
def sources() -> Sources:
    found = Sources()
    paths = [path for folder in SOURCES for path in sorted((ROOT / folder).rglob("*.py"))]
    assert len(paths) > 500
    for path in paths:
        where = str(path.relative_to(ROOT))
        found.names.setdefault(path.stem, where)
        imports = found.imports.setdefault(path, set())
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, _DOCUMENTED) and (text := ast.get_docstring(node)):
                found.docstrings.setdefault(text.splitlines()[0], where)
            elif isinstance(node, ast.Import):
                imports.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                imports.add(node.module or "")
            for attribute in ("name", "id", "attr", "arg"):
                if isinstance(name := getattr(node, attribute, None), str):
                    found.names.setdefault(name, f"{where}:{getattr(node, 'lineno', 0)}")
    return found
