"""A run's folder: what job it belongs to, and, once finished, its result. Small JSON files at any fsspec URL."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any

import fsspec

from elastic_dp.errors import RunMismatch


@dataclass(frozen=True)
class Result:
    """How a run ended.

    `step`: committed steps. `reason`: why it ended. `weights_sha256`: digest of names, shapes, dtypes and bytes of the
    final parameters and buffers. `exact`: the weights do not depend on the fleet; otherwise `inexact_because`
    says what broke it. `metrics`: the newest value of everything logged. `generations`: how many groups there
    were. `workers_lost`: processes lost before the end. `wall_s`: from start to end.
    """

    name: str
    path: str
    step: int
    reason: str
    weights_sha256: str
    exact: bool
    inexact_because: tuple[str, ...] = ()
    metrics: dict[str, Any] = field(default_factory=dict)
    generations: int = 1
    workers_lost: int = 0
    wall_s: float = 0.0


@dataclass(frozen=True)
class RunRecord:
    """What decides a run's result and must not change while it keeps its name."""

    virtual_workers: int
    micro_batch_size: int
    seed: int
    data: str
    exact: bool

    def check_or_write(self, url: str) -> None:
        """The first start writes it; a later one must say the same. Raises RunMismatch."""
        path = f"{url}/run.json"
        stored = _read(path)
        if stored is None:
            _write(path, dataclasses.asdict(self))
            return
        for name, mine in dataclasses.asdict(self).items():
            if stored.get(name) != mine:
                what = "data (its fingerprint)" if name == "data" else name
                raise RunMismatch(
                    f"{what} is {mine!r}, but the run at {url} was started with {stored.get(name)!r}. "
                    "Use a new name= for a new run, or the old value to go on with this one"
                )


def read_result(url: str) -> Result | None:
    stored = _read(f"{url}/result.json")
    if stored is None:
        return None
    stored["inexact_because"] = tuple(stored["inexact_because"])
    return Result(**stored)


def write_result(url: str, result: Result) -> None:
    _write(f"{url}/result.json", dataclasses.asdict(result))


def _read(path: str) -> dict[str, Any] | None:
    fs, inner = fsspec.url_to_fs(path)
    if not fs.exists(inner):
        return None
    with fs.open(inner, "r") as file:
        content: dict[str, Any] = json.load(file)
        return content


def _write(path: str, content: dict[str, Any]) -> None:
    fs, inner = fsspec.url_to_fs(path)
    fs.makedirs(fs._parent(inner), exist_ok=True)
    with fs.open(inner, "w") as file:
        json.dump(content, file, indent=2, default=str)
