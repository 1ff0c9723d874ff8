"""A run's folder: what job it belongs to, and, once finished, its result. Small JSON files at any fsspec URL.

What needs pyarrow is imported where it is used, since the command line reads results without it.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import fsspec

from elastic_dp.errors import RunMismatch
from elastic_dp.spec import JobSpec
from elastic_dp.storage import redact_url

if TYPE_CHECKING:
    from elastic_dp.data import Index

FORMAT = 1  # of the JSON files here
_FORMAT_KEY = "format"
_INDEX = "index.arrows"
_LIMITS = "limits"


@dataclass(frozen=True)
class Result:
    """How a run ended.

    `step`: committed steps. `reason`: why it ended. `weights_sha256`: digest of names, shapes, dtypes and bytes of the
    final parameters and buffers. `exact`: the weights do not depend on the fleet; otherwise `inexact_because`
    says what broke it. `skipped`: row groups that could not be decoded and were left out. `metrics`: the newest value of everything logged. `generations`: how many groups there
    were. `workers_lost`: processes lost before the end, without those that were asked to leave. `wall_s`: from start to end.
    """

    name: str
    path: str
    step: int
    reason: str
    weights_sha256: str
    exact: bool
    inexact_because: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
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

    def check_or_write(self, url: str, index: Index | None) -> None:
        """The first start writes it, with the data set's index; a later one must say the same.

        Raises RunMismatch, which names what of the data set has changed.
        """
        from elastic_dp.data import difference

        path = f"{url}/run.json"
        stored = _read(path)
        if stored is None:
            if index is not None:
                _write_bytes(f"{url}/{_INDEX}", index.to_bytes())
            _write(path, dataclasses.asdict(self))
            return
        for name, mine in dataclasses.asdict(self).items():
            if stored.get(name) != mine:
                what = "data (its fingerprint)" if name == "data" else name
                if name == "data" and index is not None and (old := _read_index(url)) is not None:
                    changed = difference(old, index)
                    if changed is not None:
                        raise RunMismatch(
                            f"the data set is not the one that the run at {redact_url(url)} was started with: {changed}. "
                            "Use a new name= for a new run, or bring the old data set back"
                        )
                raise RunMismatch(
                    f"{what} is {mine!r}, but the run at {redact_url(url)} was started with {stored.get(name)!r}. "
                    "Use a new name= for a new run, or the old value to go on with this one"
                )


def virtual_workers_of(url: str) -> int | None:
    """What the run's first start fixed; None before it."""
    stored = _read(f"{url}/run.json")
    return None if stored is None else int(stored["virtual_workers"])


@dataclass(frozen=True)
class Limits:
    """What ended a run: kept beside its result, which counts until one of them is raised. None: no limit."""

    max_steps: int | None = None
    epochs: int | None = None
    max_time_s: float | None = None
    stopped: bool = False  # by an operator; then it may go on as it is

    @classmethod
    def of(cls, spec: JobSpec, stopped: bool = False) -> Limits:
        return cls(spec.max_steps, spec.data.epochs, spec.max_time_s, stopped)

    def steps(self, steps_per_epoch: int) -> float:
        epochs = math.inf if self.epochs is None else self.epochs * steps_per_epoch
        return min(epochs, math.inf if self.max_steps is None else self.max_steps)

    @property
    def time_s(self) -> float:
        return math.inf if self.max_time_s is None else self.max_time_s


def finished(url: str, limits: Limits, steps_per_epoch: int) -> Result | None:
    """The stored result, unless `limits` let the run go on: raised, or an operator stopped it, with steps to make."""
    result, then = _read_result(url)
    if result is None:
        return None
    steps = limits.steps(steps_per_epoch)
    raised = steps > then.steps(steps_per_epoch) or limits.time_s > then.time_s or then.stopped
    if raised and result.step < steps:
        return None
    if dataclasses.replace(then, stopped=False) != limits:
        warnings.warn(
            f"the run at {redact_url(url)} ended after step {result.step} ({result.reason}) under other limits; its result is "
            "returned, since none was raised that would let it go on",
            stacklevel=2,
        )
    return result


def run_url(name: str, storage_path: str | os.PathLike[str]) -> str:
    """The run's folder."""
    return f"{os.fspath(storage_path).rstrip('/')}/{name}"


def read_result(url: str) -> Result | None:
    return _read_result(url)[0]


def write_result(url: str, result: Result, limits: Limits) -> None:
    _write(f"{url}/result.json", dataclasses.asdict(result) | {_LIMITS: dataclasses.asdict(limits)})


def _read_result(url: str) -> tuple[Result | None, Limits]:
    stored = _read(f"{url}/result.json")
    if stored is None:
        return None, Limits()
    limits = Limits(**stored.pop(_LIMITS, {}))
    for name in ("inexact_because", "skipped"):
        stored[name] = tuple(stored.get(name, ()))
    return Result(**stored), limits


def _read_index(url: str) -> Index | None:
    from elastic_dp.data import Index

    fs, inner = fsspec.url_to_fs(f"{url}/{_INDEX}")
    return Index.from_bytes(fs.cat_file(inner)) if fs.exists(inner) else None


def _write_bytes(path: str, content: bytes) -> None:
    fs, inner = fsspec.url_to_fs(path)
    fs.makedirs(fs._parent(inner), exist_ok=True)
    fs.pipe_file(inner, content)


def _read(path: str) -> dict[str, Any] | None:
    fs, inner = fsspec.url_to_fs(path)
    if not fs.exists(inner):
        return None
    with fs.open(inner, "r") as file:
        content: dict[str, Any] = json.load(file)
    number = content.pop(_FORMAT_KEY, 1)  # the first had none
    if number > FORMAT:
        raise RunMismatch(
            f"{path} is of format {number}, and this elastic_dp reads up to {FORMAT}; install the version that "
            "wrote it, or a later one, or use a new name= for a new run"
        )
    return content


def _write(path: str, content: dict[str, Any]) -> None:
    content = {_FORMAT_KEY: FORMAT} | content
    _write_bytes(path, json.dumps(content, indent=2, default=str).encode())
