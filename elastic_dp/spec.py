"""The configuration of a job: frozen values, checked once, before anything starts.

Every check is here and names the field and the way out; nothing below reads the environment or corrects a
value in silence. `ScalingConfig.virtual_workers` and `DataConfig` decide the result of a run; everything else
decides only where and how fast it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from elastic_dp.errors import SpecError


def _at_least(name: str, value: float | None, minimum: float) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise SpecError(f"{name} is {value!r}, must be a number")
    if value < minimum:
        raise SpecError(f"{name} is {value}, must be at least {minimum}")


def _whole(name: str, value: int | None, minimum: int) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise SpecError(f"{name} is {value!r}, must be a whole number")
    _at_least(name, value, minimum)


def _one_of(name: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise SpecError(f"{name} is {value!r}, must be one of {', '.join(map(repr, allowed))}")


@dataclass(frozen=True, kw_only=True)
class _Order:
    """What both kinds of data set share: how rows become steps."""

    micro_batch_size: int
    epochs: int | None = None
    seed: int = 0
    tail: Literal["drop", "short"] = "drop"

    def _check(self, owner: str) -> None:
        _whole(f"{owner}.micro_batch_size", self.micro_batch_size, 1)
        _whole(f"{owner}.epochs", self.epochs, 1)
        _whole(f"{owner}.seed", self.seed, 0)
        _one_of(f"{owner}.tail", self.tail, ("drop", "short"))


@dataclass(frozen=True)
class DataConfig(_Order):
    """Shards of rows at a URL.

    `url`: a folder, a file or a glob of Parquet shards, by any fsspec URL. `micro_batch_size`: rows of one
    virtual worker in one step. `columns`: read only these. `transform(batch)`: on each micro-batch, a dict of
    arrays, before it becomes tensors. `collate_fn(batch)`: makes the micro-batch itself from a dict of arrays.
    `epochs`: passes over the data, None for no limit. `shuffle`: "none", or "rows": rows within blocks of row
    groups, the row groups permuted. `tail`: what becomes of the rows that do not fill the last global batch of
    an epoch: "drop" them, or a "short" batch with the right weights.
    """

    url: str
    columns: Sequence[str] | None = field(default=None, kw_only=True)
    transform: Callable[..., Any] | None = field(default=None, kw_only=True)
    collate_fn: Callable[..., Any] | None = field(default=None, kw_only=True)
    shuffle: Literal["none", "rows"] = field(default="rows", kw_only=True)
    storage_options: Mapping[str, Any] | None = field(default=None, kw_only=True, repr=False)

    def __post_init__(self) -> None:
        self._check("DataConfig")
        if not isinstance(self.url, str) or not self.url:
            raise SpecError(f"DataConfig.url is {self.url!r}, must be a path or URL")
        _one_of("DataConfig.shuffle", self.shuffle, ("none", "rows"))
        if self.columns is not None and (isinstance(self.columns, str) or not self.columns):
            raise SpecError(
                "DataConfig.columns must be a list of at least one column name, or None"
            )


@dataclass(frozen=True)
class MapStyleData(_Order):
    """Any map-style `torch.utils.data.Dataset` (`__len__`, `__getitem__`), in the same order arithmetic.

    The dataset is sent to every worker by pickle. `collate_fn` defaults to torch's `default_collate`.
    """

    dataset: Any
    collate_fn: Callable[..., Any] | None = field(default=None, kw_only=True)
    shuffle: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        self._check("MapStyleData")
        if not hasattr(self.dataset, "__len__") or not hasattr(self.dataset, "__getitem__"):
            raise SpecError(
                "MapStyleData.dataset needs __len__ and __getitem__; for a stream of rows write Parquet "
                "shards and use DataConfig"
            )


@dataclass(frozen=True, kw_only=True)
class ScalingConfig:
    """How many workers, and of what size.

    `virtual_workers` V fixes the math: the global batch is V micro-batches whatever the number of workers; it
    defaults to `max_workers` at the run's first start. `standby`: workers kept warm without a rank.
    `resources_per_worker`: as Ray counts them, {"CPU": 1} by default; with a "GPU" of 1 or more each worker
    has its own and NCCL is used, otherwise Gloo. `threads_per_worker`: torch's threads, part of the job since
    they change bits; defaults to the worker's CPUs.
    """

    min_workers: int = 1
    max_workers: int = 1
    virtual_workers: int | None = None
    standby: int = 0
    resources_per_worker: Mapping[str, float] = field(default_factory=lambda: {"CPU": 1})
    threads_per_worker: int | None = None

    def __post_init__(self) -> None:
        _whole("ScalingConfig.min_workers", self.min_workers, 1)
        _whole("ScalingConfig.max_workers", self.max_workers, 1)
        _whole("ScalingConfig.virtual_workers", self.virtual_workers, 1)
        _whole("ScalingConfig.standby", self.standby, 0)
        _whole("ScalingConfig.threads_per_worker", self.threads_per_worker, 1)
        if self.min_workers > self.max_workers:
            raise SpecError(
                f"ScalingConfig.min_workers is {self.min_workers}, more than max_workers "
                f"({self.max_workers}); lower it, or raise max_workers"
            )
        if self.num_virtual_workers < self.max_workers:
            raise SpecError(
                f"ScalingConfig.virtual_workers is {self.virtual_workers}, less than max_workers "
                f"({self.max_workers}): some workers would have nothing to do; raise it to at least "
                f"{self.max_workers}, or lower max_workers"
            )
        for name, amount in self.resources_per_worker.items():
            _at_least(f"ScalingConfig.resources_per_worker[{name!r}]", amount, 0)

    @property
    def num_virtual_workers(self) -> int:
        return self.max_workers if self.virtual_workers is None else self.virtual_workers

    @property
    def num_threads(self) -> int:
        if self.threads_per_worker is not None:
            return self.threads_per_worker
        return max(1, int(self.resources_per_worker.get("CPU", 1)))


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When to checkpoint and what to keep. None: never by steps."""

    every_steps: int | None = None
    num_to_keep: int | None = 3

    def __post_init__(self) -> None:
        _whole("CheckpointConfig.every_steps", self.every_steps, 1)
        _whole("CheckpointConfig.num_to_keep", self.num_to_keep, 1)


@dataclass(frozen=True, kw_only=True)
class FailureConfig:
    """How long to wait and how often to try.

    `heartbeat_timeout_s` is the one timeout to set; the others follow from it where they are None:
    the lease of a worker that hears no controller (2 ×), and the forming of a group (1 ×).
    `max_losses_without_progress`: workers lost in a row without one committed step before the run fails.
    """

    heartbeat_timeout_s: float = 5.0
    lease_s: float | None = None
    forming_timeout_s: float | None = None
    release_timeout_s: float = 10.0
    max_losses_without_progress: int = 50

    def __post_init__(self) -> None:
        _at_least("FailureConfig.heartbeat_timeout_s", self.heartbeat_timeout_s, 0.1)
        _at_least("FailureConfig.lease_s", self.lease_s, 0.1)
        _at_least("FailureConfig.forming_timeout_s", self.forming_timeout_s, 0.1)
        _at_least("FailureConfig.release_timeout_s", self.release_timeout_s, 0.0)
        _whole("FailureConfig.max_losses_without_progress", self.max_losses_without_progress, 1)

    @property
    def heartbeat_interval_s(self) -> float:
        return min(0.25, self.heartbeat_timeout_s / 8)

    @property
    def lease(self) -> float:
        return 2 * self.heartbeat_timeout_s if self.lease_s is None else self.lease_s

    @property
    def forming_timeout(self) -> float:
        if self.forming_timeout_s is None:
            return self.heartbeat_timeout_s
        return self.forming_timeout_s


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """All that decides a run, as a value. `config` is the user's own, handed to the train function."""

    name: str
    data: DataConfig | MapStyleData
    config: Mapping[str, Any] = field(default_factory=dict)
    scaling: ScalingConfig = field(default_factory=ScalingConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    failure: FailureConfig = field(default_factory=FailureConfig)
    exact: bool = True
    max_steps: int | None = None
    max_time_s: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name or "/" in self.name:
            raise SpecError(f"name is {self.name!r}, must be a word without '/'")
        if not isinstance(self.data, DataConfig | MapStyleData):
            raise SpecError(
                f"data is a {type(self.data).__name__}, must be a DataConfig or a MapStyleData"
            )
        _whole("max_steps", self.max_steps, 1)
        _at_least("max_time_s", self.max_time_s, 0.001)
        if self.data.epochs is None and self.max_steps is None and self.max_time_s is None:
            raise SpecError(
                "max_steps is None, and so are max_time_s and the data's epochs: the run would never "
                "end; set one of the three"
            )
