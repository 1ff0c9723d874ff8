"""Modules that a file of tests imports when a test first uses them: each process of the tests
imports every file, and such a module takes seconds."""

import importlib
from typing import Any


class ImportedWhenUsed:
    """`pl = ImportedWhenUsed("lightning.pytorch")` stands for `import lightning.pytorch as pl`."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        # pytest asks all that a file has whether it is a test, a fixture or a mock.
        if attribute.startswith("__") or attribute == "_mock_name":
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)
