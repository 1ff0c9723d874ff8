"""What the last start of a run was like, so that the next one can say what has changed and yet may.

`start.json` in the run's folder, written by each start that goes on. What must not change is `run.json`'s
(record.py); what the code gives the optimizer is found when a checkpoint is read (train/restoring.py).
"""

from __future__ import annotations

import dataclasses
import json
import platform
from dataclasses import dataclass
from typing import Any

from elastic_dp.cluster.record import Limits
from elastic_dp.spec import JobSpec
from elastic_dp.storage import ObjectMissing, Store
from elastic_dp.train.code import code_of

_FORMAT = 1
_NAME = "start.json"


@dataclass(frozen=True)
class Start:
    code: str  # train.code.code_of
    python: str  # another one compiles the same code differently
    limits: Limits

    @classmethod
    def of(cls, spec: JobSpec, train: Any) -> Start:
        python = ".".join(platform.python_version_tuple()[:2])
        return cls(code_of(train), python, Limits.of(spec))

    def limits_changed(self, before: Start, raised: bool) -> list[str]:
        """In words: those that were raised, which is how a run is continued, or all others."""
        names = [field.name for field in dataclasses.fields(Limits)]
        pairs = [(n, getattr(self.limits, n), getattr(before.limits, n)) for n in names]
        return [
            f"{name} is {now} now, was {then}"
            for name, now, then in pairs
            if now != then and (then is not None and (now is None or now > then)) == raised
        ]

    def code_changed(self, before: Start) -> list[str]:
        """In words."""
        if before.python != self.python:
            return [f"Python is {self.python} now, was {before.python}"]
        if before.code != self.code:
            return ["the code of the train function, or of what it uses, is not what it was"]
        return []

    def write(self, store: Store) -> None:
        content = {"format": _FORMAT} | dataclasses.asdict(self)
        store.write(_path(store), json.dumps(content, indent=2).encode())


def last_start(store: Store) -> Start | None:
    """None before the first."""
    try:
        stored = json.loads(bytes(store.read_all(_path(store))))
        if stored.pop("format") > _FORMAT:
            return None  # it is for saying what has changed, no more
        return Start(**stored | {"limits": Limits(**stored["limits"])})
    except (ObjectMissing, ValueError, KeyError, TypeError):
        return None


def _path(store: Store) -> str:
    return f"{store.path.rstrip('/')}/{_NAME}" if store.path else _NAME
