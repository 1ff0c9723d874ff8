"""The configuration of a job: frozen values, checked once, before anything starts.

Every check is here and names the field and the way out; nothing below reads the environment or corrects a
value in silence. `ScalingConfig.virtual_workers` and `DataConfig` decide the result of a run; everything else
decides only where and how fast it runs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal, get_args

from elastic_dp.errors import SpecError
from elastic_dp.urls import redact_url

Format = Literal["parquet", "arrow", "jsonl", "csv", "tar"]


def _at_least(name: str, value: float | None, minimum: float) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise SpecError(f"{name} is {value!r}, must be a number")
    if not _is_finite(value):
        raise SpecError(f"{name} is {value}, must be finite; for no limit leave it out")
    if value < minimum:
        raise SpecError(f"{name} is {value}, must be at least {minimum}")


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond the largest float
        return False


def _whole(name: str, value: int | None, minimum: int) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise SpecError(f"{name} is {value!r}, must be a whole number")
    _at_least(name, value, minimum)


def _one_of(name: str, value: str | None, allowed: Sequence[str | None]) -> None:
    if value not in allowed:
        raise SpecError(f"{name} is {value!r}, must be one of {', '.join(map(repr, allowed))}")


def _are_labels(names: Any) -> bool:
    """A list of texts that Ray takes as a label's name or value, which are Kubernetes' rules."""
    pattern = r"[a-zA-Z0-9]([a-zA-Z0-9_.-]{0,61}[a-zA-Z0-9])?"
    is_list = isinstance(names, Sequence) and not isinstance(names, str)
    return is_list and all(isinstance(x, str) and re.fullmatch(pattern, x) for x in names)


def label_values(wanted: str) -> list[str]:
    """Those that a text of `ScalingConfig.label_selector` names: a, !a, in(a,b) or !in(a,b)."""
    values = wanted.removeprefix("!")
    if values.startswith("in(") and values.endswith(")"):
        values = values[len("in(") : -1]
    return [value.strip() for value in values.split(",")]


def _yes_or_no(name: str, value: bool) -> None:
    if not isinstance(value, bool):
        raise SpecError(f"{name} is {value!r}, must be True or False")


def _callable(name: str, value: Any) -> None:
    if value is not None and not callable(value):
        raise SpecError(f"{name} is {value!r}, must be a function, or None")


def _all_given(owner: str, config: Any) -> None:
    """None only where it is the default, or the field's own check speaks of it."""
    for x in fields(config):
        if getattr(config, x.name) is None and x.default is not None and x.default is not MISSING:
            raise SpecError(f"{owner}.{x.name} is None; leave it out for {x.default!r}")


@dataclass(frozen=True, kw_only=True)
class _Order:
    """What both kinds of data set share: how rows become steps."""

    micro_batch_size: int
    epochs: int | None = None
    seed: int = 0
    tail: Literal["drop", "short"] = "drop"

    def _check(self, owner: str) -> None:
        _all_given(owner, self)
        if self.micro_batch_size is None:
            raise SpecError(f"{owner}.micro_batch_size is None, must be a whole number")
        _whole(f"{owner}.micro_batch_size", self.micro_batch_size, 1)
        _whole(f"{owner}.epochs", self.epochs, 1)
        _whole(f"{owner}.seed", self.seed, 0)
        _one_of(f"{owner}.tail", self.tail, ("drop", "short"))


@dataclass(frozen=True, repr=False)
class DataConfig(_Order):
    """Shards of rows at a URL.

    `url`: a folder, a file or a glob, by any fsspec URL; a list of them is one data set; a dict of them gives
    each source its weight in every global batch. `format`: of the shards; None: by their names' endings.
    `micro_batch_size`: rows of one virtual worker in one step. `columns`: read only these.
    `transform(batch)`: on each micro-batch, a dict of arrays, before it becomes tensors, with Python's, NumPy's
    and torch's global generators set for (seed, step, virtual worker); `transform(batch, rng)` is given a
    `numpy.random.Generator` instead, and runs ahead of the step in a thread. `collate_fn(batch)`: makes the
    micro-batch itself from a dict of arrays. `workers`: processes that run both ahead of the step; 0: none.
    `fill_nulls`: what stands for a column's nulls, {"x": 0.0}; those of other columns are refused, but of text are None.
    `epochs`: passes over the data, None for no limit. `shuffle`: "none"; "rows": rows within blocks of row
    groups, the row groups permuted; "full": all rows, which needs the data set in memory. `tail`: what becomes
    of the rows that do not fill the last global batch of an epoch: "drop" them, or a "short" batch with the
    right weights. `memory_bytes`: of row groups that one worker holds or has on the way. `on_bad_shard`: a row
    group that cannot be decoded fails the run, or "skip": its rows are left out, and said, up to `max_bad_fraction` of
    all rows (with weights: of each source's); more fail the run.
    """

    url: str | Sequence[str] | Mapping[str, float]
    format: Format | None = field(default=None, kw_only=True)
    columns: Sequence[str] | None = field(default=None, kw_only=True)
    transform: Callable[..., Any] | None = field(default=None, kw_only=True)
    collate_fn: Callable[..., Any] | None = field(default=None, kw_only=True)
    workers: int = field(default=0, kw_only=True)
    shuffle: Literal["none", "rows", "full"] = field(default="rows", kw_only=True)
    memory_bytes: int = field(default=2 << 30, kw_only=True)
    on_bad_shard: Literal["fail", "skip"] = field(default="fail", kw_only=True)
    max_bad_fraction: float = field(default=0.01, kw_only=True)
    fill_nulls: Mapping[str, Any] | None = field(default=None, kw_only=True)
    storage_options: Mapping[str, Any] | None = field(default=None, kw_only=True, repr=False)

    def __post_init__(self) -> None:
        self._check("DataConfig")
        if hasattr(self.url, "__fspath__"):  # a pathlib.Path
            object.__setattr__(self, "url", self.url.__fspath__())
        several = isinstance(self.url, Sequence | Mapping)
        if not several or not self.urls or not all(isinstance(u, str) and u for u in self.urls):
            raise SpecError(
                f"DataConfig.url is {redact_url(repr(self.url))}, must be a path or URL, a list of them, or a dict of "
                "them with weights"
            )
        if isinstance(self.url, Mapping):
            for url, weight in self.url.items():
                name = f"DataConfig.url[{redact_url(url)!r}]"
                _at_least(name, weight, 0)
                if not weight:
                    raise SpecError(f"{name} has weight 0; leave it out")
            if self.epochs is not None:
                message = "each of several weighted sources counts its own; set max_steps instead"
                raise SpecError(f"DataConfig.epochs is set, but {message}")
        _callable("DataConfig.transform", self.transform)
        _callable("DataConfig.collate_fn", self.collate_fn)
        _one_of("DataConfig.shuffle", self.shuffle, ("none", "rows", "full"))
        if self.format is not None:
            _one_of("DataConfig.format", self.format, get_args(Format))
        _one_of("DataConfig.on_bad_shard", self.on_bad_shard, ("fail", "skip"))
        if type(self.max_bad_fraction) not in (int, float) or not 0 <= self.max_bad_fraction <= 1:
            raise SpecError(f"DataConfig.max_bad_fraction is {self.max_bad_fraction!r}, not 0 to 1")
        _whole("DataConfig.workers", self.workers, 0)
        _whole("DataConfig.memory_bytes", self.memory_bytes, 1 << 20)
        if self.columns is not None and (isinstance(self.columns, str) or not self.columns):
            raise SpecError("DataConfig.columns must be a list of one column name or more, or None")
        fills, plain = self.fill_nulls or {}, bool | int | float | str | bytes
        if not isinstance(fills, Mapping) or not all(isinstance(v, plain) for v in fills.values()):
            raise SpecError(f"DataConfig.fill_nulls is {fills!r}, must be numbers or texts by name")

    def __repr__(self) -> str:
        """Without credentials."""
        said = (f"{x.name}={getattr(self, x.name)!r}" for x in fields(self) if x.repr)
        return redact_url(f"DataConfig({', '.join(said)})")

    @property
    def urls(self) -> tuple[str, ...]:
        return (self.url,) if isinstance(self.url, str) else tuple(self.url)


@dataclass(frozen=True)
class MapStyleData(_Order):
    """Any map-style `torch.utils.data.Dataset` (`__len__`, `__getitem__`), in the same order arithmetic.

    The dataset is sent to every worker by pickle. `collate_fn` defaults to torch's `default_collate`.
    `workers`: processes that fetch and collate ahead of the step; 0: in the training thread. A run that is
    started again knows its data by the dataset's class, its number of rows, and `fingerprint`, a text of yours that
    changes with the rows (a version, a checksum). Items are not looked at, so without one other rows, as many and of
    the same class, pass as the same.
    """

    dataset: Any
    workers: int = field(default=0, kw_only=True)
    collate_fn: Callable[..., Any] | None = field(default=None, kw_only=True)
    shuffle: bool = field(default=True, kw_only=True)
    fingerprint: str = field(default="", kw_only=True)

    def __post_init__(self) -> None:
        self._check("MapStyleData")
        _callable("MapStyleData.collate_fn", self.collate_fn)
        _yes_or_no("MapStyleData.shuffle", self.shuffle)
        if not isinstance(self.fingerprint, str):
            raise SpecError(f"MapStyleData.fingerprint is {self.fingerprint!r}, must be a text")
        _whole("MapStyleData.workers", self.workers, 0)
        data = self.dataset
        if isinstance(data, str) or (isinstance(data, Mapping) and {*data} != {*range(len(data))}):
            raise SpecError(
                f"MapStyleData.dataset is a {type(data).__name__}, whose items are not numbered from 0; give one "
                'dataset, e.g. that of "train", or DataConfig a URL'
            )
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
    they change bits; defaults to the worker's CPUs. `stabilization_s`: a worker that is ready to join waits at most
    this long for others that are about to be ready, and as long after the last join, so that a burst of new nodes
    stops the group once or twice; it waits for nobody where it takes the last place, or no other builds its model.
    `balance`: "equal", or "measured": a slower worker runs fewer virtual workers where that makes a step at least a tenth
    shorter; a ready standby replaces one that runs a single one and is slowest by a fifth of a step for five minutes.

    On nodes with Ray's labels: `market` "spot", "on-demand", "spot-first" (on-demand where no spot node is to be had)
    or "any"; `min_on_demand` of the workers are asked for on-demand nodes whatever the market, and stay when others can
    leave. `zones`: each worker is asked for the one of these where the fewest are, and for any other where that has no
    room. `label_selector`: what else its node must be labelled, in Ray's words, {"ray.io/accelerator-type": "in(A100,H100)"}.
    """

    min_workers: int = 1
    max_workers: int = 1
    virtual_workers: int | None = None
    standby: int = 0
    resources_per_worker: Mapping[str, float] = field(default_factory=lambda: {"CPU": 1})
    threads_per_worker: int | None = None
    stabilization_s: float = 5.0
    market: Literal["any", "spot", "on-demand", "spot-first"] = "any"
    min_on_demand: int = 0
    zones: Sequence[str] = ()
    label_selector: Mapping[str, str] = field(default_factory=dict)
    balance: Literal["equal", "measured"] = "equal"

    def __post_init__(self) -> None:
        _all_given("ScalingConfig", self)
        if not isinstance(self.resources_per_worker, Mapping):
            raise SpecError(
                f"ScalingConfig.resources_per_worker is {self.resources_per_worker!r}, must be a dict of amounts, "
                'e.g. {"CPU": 1}'
            )
        _whole("ScalingConfig.min_workers", self.min_workers, 1)
        _whole("ScalingConfig.max_workers", self.max_workers, 1)
        _whole("ScalingConfig.virtual_workers", self.virtual_workers, 1)
        _whole("ScalingConfig.standby", self.standby, 0)
        _whole("ScalingConfig.threads_per_worker", self.threads_per_worker, 1)
        _at_least("ScalingConfig.stabilization_s", self.stabilization_s, 0.0)
        _one_of("ScalingConfig.market", self.market, ("any", "spot", "on-demand", "spot-first"))
        _one_of("ScalingConfig.balance", self.balance, ("equal", "measured"))
        _whole("ScalingConfig.min_on_demand", self.min_on_demand, 0)
        if not _are_labels(self.zones):
            raise SpecError(
                f"ScalingConfig.zones is {self.zones!r}, must be a list of names as labels have them"
            )
        self._check_label_selector()
        if self.min_on_demand > self.max_workers:
            raise SpecError(
                f"ScalingConfig.min_on_demand is {self.min_on_demand}, more than max_workers ({self.max_workers})"
            )
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
            field = f"ScalingConfig.resources_per_worker[{name!r}]"
            if not isinstance(name, str) or not name:
                raise SpecError(f"{field}: a resource's name must be a text")
            _at_least(field, amount, 0)
            if name == "GPU" and amount > 1 and amount != int(amount):
                raise SpecError(f"{field} is {amount!r}, must be a whole number, or below 1")

    def _check_label_selector(self) -> None:
        selector = self.label_selector
        if not isinstance(selector, Mapping) or not all(
            isinstance(text, str) and text for pair in selector.items() for text in pair
        ):
            raise SpecError(
                f"ScalingConfig.label_selector is {selector!r}, must be texts by label, as in "
                '{"ray.io/accelerator-type": "H100"}'
            )
        for label, wanted in selector.items():
            prefix, _, key = label.rpartition("/")
            names = [*prefix.split("."), key] if prefix else [key]
            if not _are_labels([*names, *label_values(wanted)]):
                raise SpecError(
                    f"ScalingConfig.label_selector has {label!r}: {wanted!r}, and Ray takes a label's name, and as its "
                    "value a, !a, in(a,b) or !in(a,b), of up to 63 letters, digits, '-', '_' and '.' each"
                )
        market = self.market != "any" or self.min_on_demand > 0
        for label, asks in (("market-type", market), ("availability-zone", bool(self.zones))):
            if asks and f"ray.io/{label}" in selector:
                raise SpecError(
                    f"ScalingConfig.label_selector names ray.io/{label}, which market, min_on_demand and zones "
                    "ask for, too; leave it to one of them"
                )

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
    """When to checkpoint and what to keep.

    The last step of a run that ends or is stopped is always kept. Where none of the first three is given, that is the
    only one, but for those that a run makes when it would otherwise lose steps: when a notice takes away so many workers
    that it cannot go on, on Ctrl-C, and when its workers are left without a controller.
    `every_steps`: after each step that it divides. `every_s`: so many seconds after the last one. `every="auto"`: as
    often as pays, by what a checkpoint costs and how often everyone was lost. Whichever comes first; None: not by
    that. `num_to_keep`: the newest, or the best where `checkpoint_score_attribute` names a logged metric
    (`checkpoint_score_order` "max" or "min"); None: all. A checkpoint is ranked by the value that the body of its own step
    logged; one without a value is never the best. The best and the newest are both kept, whatever `num_to_keep` is.
    `keep_every`: each step that it divides is kept for ever.
    """

    every_steps: int | None = None
    every_s: float | None = None
    every: Literal["auto"] | None = None
    num_to_keep: int | None = 3
    keep_every: int | None = None
    checkpoint_score_attribute: str | None = None
    checkpoint_score_order: Literal["max", "min"] = "max"

    def __post_init__(self) -> None:
        _whole("CheckpointConfig.every_steps", self.every_steps, 1)
        _at_least("CheckpointConfig.every_s", self.every_s, 1e-3)
        _one_of("CheckpointConfig.every", self.every, (None, "auto"))
        _whole("CheckpointConfig.num_to_keep", self.num_to_keep, 1)
        _whole("CheckpointConfig.keep_every", self.keep_every, 1)
        _one_of(
            "CheckpointConfig.checkpoint_score_order", self.checkpoint_score_order, ("max", "min")
        )

    @property
    def enabled(self) -> bool:
        """Whether any are made unasked."""
        return (self.every_steps, self.every_s, self.every) != (None, None, None)


@dataclass(frozen=True, kw_only=True)
class FailureConfig:
    """How long to wait and how often to try.

    `heartbeat_timeout_s` is the one timeout to set; the others follow from it where they are None:
    the lease of a worker that hears no controller (2 ×), and the forming of a group (1 ×).
    `orphan_timeout_s`: workers that no controller has answered for so long end themselves, and drivers ask no longer
    (60 × the lease: 10 minutes, as long as KubeRay lets a worker node wait for a lost head).
    `hang_timeout_s`: how long a worker that lives may keep the others waiting in a step before it is replaced (the
    loop's body, evaluations and waits for data are not counted; six times as long where its process computes, and in
    its first step); None: 300 s, or 20 × the median step if that is longer.
    `compare_weights_every`: all members' weights are compared after so many steps, and after those that go into a
    checkpoint; None: never. Where they differ, all are replaced, and the run goes back to the newest checkpoint of when
    they agreed. (Not with `exact=False`: there, machines of different kinds may differ.)
    The budgets are of what may go wrong in a row without one committed step before the run fails, by kind, with a growing
    pause in between: `max_losses_without_progress` workers lost; `max_out_of_memory` workers that ran out of memory;
    `max_losses_of_micro_batch` workers that died while they ran one and the same micro-batch; `max_user_errors`
    exceptions of user code that are tried again, on a fresh worker (0: the first fails the run; errors of this
    package always do). What falls together is one incident. A worker whose node is preempted counts against none.
    `run_lease_s`: how long another cluster waits before it takes over a run whose controller renews no more.
    `storage_timeout_s`: how long a store may be away at the start, and in a run before the wait is said.
    """

    heartbeat_timeout_s: float = 5.0
    lease_s: float | None = None
    forming_timeout_s: float | None = None
    hang_timeout_s: float | None = None
    release_timeout_s: float = 10.0
    compare_weights_every: int | None = 50
    max_losses_without_progress: int = 50
    max_losses_of_micro_batch: int = 5
    max_out_of_memory: int = 5
    max_user_errors: int = 0
    storage_timeout_s: float = 60.0
    run_lease_s: float = 60.0
    orphan_timeout_s: float | None = None

    def __post_init__(self) -> None:
        _all_given("FailureConfig", self)
        _at_least("FailureConfig.heartbeat_timeout_s", self.heartbeat_timeout_s, 0.1)
        _at_least("FailureConfig.lease_s", self.lease_s, 0.1)
        _at_least("FailureConfig.run_lease_s", self.run_lease_s, 0.5)
        _at_least("FailureConfig.forming_timeout_s", self.forming_timeout_s, 0.1)
        _at_least("FailureConfig.hang_timeout_s", self.hang_timeout_s, 1.0)
        _at_least("FailureConfig.release_timeout_s", self.release_timeout_s, 0.0)
        _whole("FailureConfig.compare_weights_every", self.compare_weights_every, 1)
        _at_least("FailureConfig.storage_timeout_s", self.storage_timeout_s, 0.0)
        _whole("FailureConfig.max_losses_without_progress", self.max_losses_without_progress, 1)
        _whole("FailureConfig.max_losses_of_micro_batch", self.max_losses_of_micro_batch, 1)
        _whole("FailureConfig.max_out_of_memory", self.max_out_of_memory, 0)
        _whole("FailureConfig.max_user_errors", self.max_user_errors, 0)
        _at_least("FailureConfig.orphan_timeout_s", self.orphan_timeout_s, 0.1)
        if self.orphan_timeout < self.lease:
            raise SpecError(
                f"FailureConfig.orphan_timeout_s is {self.orphan_timeout_s}, less than the lease "
                f"({self.lease:g} s), after which a worker stops training; raise it"
            )

    @property
    def heartbeat_interval_s(self) -> float:
        return min(0.25, self.heartbeat_timeout_s / 8)

    @property
    def lease(self) -> float:
        return 2 * self.heartbeat_timeout_s if self.lease_s is None else self.lease_s

    @property
    def orphan_timeout(self) -> float:
        return 60 * self.lease if self.orphan_timeout_s is None else self.orphan_timeout_s

    @property
    def forming_timeout(self) -> float:
        if self.forming_timeout_s is None:
            return self.heartbeat_timeout_s
        return self.forming_timeout_s


_NAME_BYTES = 255  # what file systems take as a folder's
_PARTS: dict[str, tuple[type, ...]] = {
    "data": (DataConfig, MapStyleData),
    "config": (Mapping,),
    "scaling": (ScalingConfig,),
    "checkpoint": (CheckpointConfig,),
    "failure": (FailureConfig,),
    "labels": (Mapping,),
}


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
    labels: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        word = isinstance(self.name, str) and self.name.isprintable() and "/" not in self.name
        if not word or self.name.strip() in ("", ".", ".."):
            raise SpecError(
                f"name is {self.name!r}, must be a word without '/': it names the run's folder"
            )
        if len(self.name.encode()) > _NAME_BYTES:
            raise SpecError(
                f"name is {self.name[:40]!r}…, of {len(self.name.encode())} bytes, must be at most {_NAME_BYTES}: it "
                "names the run's folder"
            )
        for name, kinds in _PARTS.items():
            value = getattr(self, name)
            if not isinstance(value, kinds):
                must = " or a ".join(kind.__name__ for kind in kinds)
                raise SpecError(f"{name} is a {type(value).__name__}, must be a {must}")
        _yes_or_no("exact", self.exact)
        if not all(isinstance(text, str) for pair in self.labels.items() for text in pair):
            raise SpecError(f"labels is {self.labels!r}, must be texts by name")
        _whole("max_steps", self.max_steps, 1)
        _at_least("max_time_s", self.max_time_s, 0.001)
        if self.data.epochs is None and self.max_steps is None and self.max_time_s is None:
            raise SpecError(
                "max_steps is None, and so are max_time_s and the data's epochs: the run would never "
                "end; set one of the three"
            )
