"""The syntax trees of the package's modules, read once for all tests of a process."""

import ast
import functools
from pathlib import Path


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())
