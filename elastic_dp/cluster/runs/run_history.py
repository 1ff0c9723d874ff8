"""The previous start of a run, so that the next one can report permitted changes.

It is `start.json` in the run's folder, written by each start that continues the run. What must not
change is in `run.json` (`run_record`). Changes of the optimizer are found when a checkpoint is
read.
"""

from __future__ import annotations

import dataclasses
import math
import platform
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from elastic_dp.config import DataConfig, JobSpec, MapStyleData
from elastic_dp.errors import FileDamaged, RunMismatch
from elastic_dp.run_record import RunLimits
from elastic_dp.storage import Store
from elastic_dp.storage.json_files import make, read_json, write_json
from elastic_dp.train.exactness.code_fingerprint import code_fingerprint, text_digest

_FORMAT = 1
_NAME = "start.json"


@dataclass(frozen=True)
class StartRecord:
    """What is compared between two starts of a run."""

    code: str  # train.exactness.code_fingerprint
    python: str  # another version compiles the same code differently
    limits: RunLimits
    total_steps: int | None = None  # by max_steps and epochs; None: no such limit
    growth: Mapping[str, int] = field(default_factory=dict)  # see `ScalingConfig.growth`
    sharding: str | None = None
    ray: str | None = None  # the address of the cluster; None: it was trained in one process
    config: Mapping[str, str] | None = None  # digests of its plain values; None: not known

    @classmethod
    def of(
        cls,
        spec: JobSpec,
        train: Any,
        steps_of: Callable[[int], int] | None = None,
    ) -> StartRecord:
        """`steps_of` is not compared, and may be left out for that."""
        python = ".".join(platform.python_version_tuple()[:2])
        limits = RunLimits.of(spec)
        total = math.inf if steps_of is None else limits.steps(steps_of)
        total_steps = int(total) if total < math.inf else None
        growth = spec.scaling.growth
        return cls(
            code_fingerprint(train, *_code_of(spec.data)),
            python,
            limits,
            total_steps,
            growth,
            sharding=spec.sharding,
            config={str(key): text_digest(value) for key, value in spec.config.items()},
        )

    def changes(self, before: StartRecord) -> list[tuple[str, bool]]:
        """Return each change in words, and whether it may be a mistake; such changes come last."""
        found = [(text, True) for text in self.code_changed(before)]
        for name in (each.name for each in dataclasses.fields(RunLimits)):
            now, then = getattr(self.limits, name), getattr(before.limits, name)
            if now != then:
                is_raised = then is not None and (now is None or now > then)
                found.insert(0, (f"{name} is {now} now, was {then}", not is_raised))
        if before.growth != self.growth:
            now, then = (
                ", ".join(f"{number} after step {steps}" for steps, number in each.items())
                or "as for the first step"
                for each in (self.growth, before.growth)
            )
            found.append((f"virtual_workers is {now} now, was {then}", False))
        if before.sharding != self.sharding:
            found.append((f"sharding is {self.sharding!r} now, was {before.sharding!r}", False))
        return sorted(found, key=lambda change: change[1])

    def code_changed(self, before: StartRecord) -> list[str]:
        """Return changes of Python, of the code and of `config`, in words."""
        found = []
        if before.python != self.python:
            found.append(f"Python is {self.python} now, was {before.python}")
        elif before.code != self.code:
            found.append(
                "the code of the train function, of the data, or of what they use, has changed"
            )
        if before.config is not None and before.config != self.config:
            keys = {key for key, _ in {*before.config.items()} ^ {*(self.config or {}).items()}}
            found.append(f"other values in config: {', '.join(sorted(keys))}")
        return found

    def write(self, store: Store) -> None:
        """Raises StorageError. Who calls it leads the run: another start waits for its end."""
        write_json(store, _NAME, dataclasses.asdict(self), _FORMAT)


def _code_of(data: DataConfig | MapStyleData) -> Iterator[Any]:
    """Yield classes and functions that make rows, also of data sets that others are made of."""
    pending = [data.collate_fn, data.dataset if isinstance(data, MapStyleData) else data.transform]
    known = set[int]()
    for one in pending:  # it grows
        if id(one) in known:
            continue
        known.add(id(one))
        yield one if callable(one) else type(one)
        held = getattr(one, "__dict__", {})
        yield from filter(callable, held.values())
        inner = held.get("datasets", [held["dataset"]] if "dataset" in held else [])
        pending += inner if isinstance(inner, list) else []  # of a ConcatDataset, of a Subset


def last_start(store: Store) -> StartRecord | None:
    """Return the previous start; None if there is none, or it cannot be read.

    It only serves to report changes.
    """
    try:
        stored = read_json(store, _NAME, _FORMAT, "")
        if stored is None:
            return None
        limits = make(RunLimits, stored["limits"], _NAME, "")
        return make(StartRecord, {**stored, "limits": limits}, _NAME, "")
    except (FileDamaged, RunMismatch, KeyError, TypeError):
        return None


def address_of(url: str) -> str | None:
    """Return the address of the Ray cluster on which the run was last started."""
    start = last_start(Store(url))
    return None if start is None else start.ray


def total_steps_of(url: str) -> int | None:
    """Return where the run ends, as its last start says; None if no number of steps was set."""
    start = last_start(Store(url))
    if start is None:
        return None
    return start.limits.max_steps if start.total_steps is None else start.total_steps
