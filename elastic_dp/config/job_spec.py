"""A job as one value."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from elastic_dp.config.checkpoint_config import CheckpointConfig
from elastic_dp.config.data_config import DataConfig, MapStyleData
from elastic_dp.config.failure_config import FailureConfig
from elastic_dp.config.field_checks import at_least, one_of, whole_number
from elastic_dp.config.scaling_config import ScalingConfig
from elastic_dp.config.schedules import by_step, check_schedule
from elastic_dp.errors import SpecError

_SEPARATOR = re.compile("/|::")  # of folders, and of chained file systems
_NAME_BYTES = 255  # the longest name of a folder in file systems
_PARTS: dict[str, tuple[type, ...]] = {
    "data": (DataConfig, MapStyleData),
    "config": (Mapping,),
    "scaling": (ScalingConfig,),
    "checkpoint": (CheckpointConfig,),
    "failure": (FailureConfig,),
}
_PROCESSES = "ScalingConfig.processes_per_worker"
_NOT_TOGETHER = (  # two fields, and why, if it is not that nobody has made it yet
    (
        "wire",
        "exact",
        ": it rounds the nodes of the fixed tree that exact sums are added along, and fast mode "
        "has no tree;",
    ),
    (
        "sharding",
        "exact",
        ": two workers update each piece, and only exact sums give both the same bits;",
    ),
    (
        "staleness",
        "exact",
        ": after the loss of a worker its part of the gradient before is computed again, and only "
        "exact sums make that the same part;",
    ),
    *((_PROCESSES, other, "") for other in ("exact", "wire", "sharding")),
    *(("staleness", other, "") for other in (_PROCESSES, "sharding")),
    *(("inner_steps", other, "") for other in ("exact", "sharding", _PROCESSES)),
)


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """Everything that defines a run. `config` is the user's own and is passed to the train
    function.
    """

    name: str
    data: DataConfig | MapStyleData
    config: Mapping[str, Any] = field(default_factory=dict)
    scaling: ScalingConfig = field(default_factory=ScalingConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    failure: FailureConfig = field(default_factory=FailureConfig)
    exact: bool = True
    wire: Literal["bf16", "int8"] | None = None
    staleness: Literal[0, 1] | Mapping[int, int] = 0
    inner_steps: int | Mapping[int, int] | None = None
    sharding: Literal["optimizer"] | None = None
    max_steps: int | None = None
    max_time_s: float | None = None
    # First and last steps whose rows are left out, since the run was rewound.
    left_out: tuple[tuple[int, int], ...] = ()
    torch_settings: Mapping[str, bool | str] = field(default_factory=dict)  # see `torch_settings`

    def __post_init__(self) -> None:
        if self.name is None:
            raise SpecError(
                "name is missing, and there is no file of a script to name the run after: give it "
                "a name=. Started again under the same name, a run goes on"
            )
        word = isinstance(self.name, str) and self.name.isprintable()
        word = word and not self.name.startswith("-")  # a command would take it for an option
        if not word or self.name.strip() in ("", ".", "..") or _SEPARATOR.search(self.name):
            raise SpecError(
                f"name is {self.name!r}, must be a word without '/' and '::' that does not begin "
                "with '-': it names the run's folder"
            )
        if len(self.name.encode()) > _NAME_BYTES:
            raise SpecError(
                f"name is {self.name[:40]!r}…, of {len(self.name.encode())} bytes, must be "
                f"at most {_NAME_BYTES}: it names the run's folder"
            )
        for name, kinds in _PARTS.items():
            value = getattr(self, name)
            if name == "data" and "DataLoader" in {kind.__name__ for kind in type(value).__mro__}:
                raise SpecError(_instead_of_loader(value))
            if not isinstance(value, kinds):
                names = [kind.__name__ for kind in kinds]
                must = " or ".join(f"{'an' if n[0] in 'AEIOU' else 'a'} {n}" for n in names)
                raise SpecError(f"{name} is a {type(value).__name__}, must be {must}")
        if not isinstance(self.exact, bool):
            raise SpecError(f"exact is {self.exact!r}, must be True or False")
        one_of("wire", self.wire, (None, "bf16", "int8"))
        one_of("sharding", self.sharding, (None, "optimizer"))
        check_schedule("staleness", self.staleness, "as in {0: 0, 2000: 1}", _check_delay)
        check_schedule("inner_steps", self.inner_steps, "as in {0: 1, 2000: 8}", _at_least_one)
        self._check_together()
        self._check_rewind()
        whole_number("max_steps", self.max_steps, 1)
        at_least("max_time_s", self.max_time_s, 0.001)
        if self.data.epochs is None and self.max_steps is None and self.max_time_s is None:
            raise SpecError(
                "max_steps is None, and so are max_time_s and the data's epochs: the run "
                "would never end; set one of the three"
            )

    @property
    def micro_batches_by_step(self) -> dict[int, int]:
        """The numbers of micro-batches, by the step after which they hold, in order: each process
        has its own, unless they share rows, and each inner step."""
        virtual, inner = self.scaling.virtual_workers_by_step, self.inner_steps_by_step
        processes = self.scaling.processes_per_worker
        steps = sorted(virtual.keys() | inner.keys())
        return {step: processes * _holding(virtual, step) * _holding(inner, step) for step in steps}

    @property
    def staleness_by_step(self) -> dict[int, int]:
        """The values of `staleness`, by the step after which they hold, in order."""
        return by_step(self.staleness)

    @property
    def inner_steps_by_step(self) -> dict[int, int]:
        """The numbers of inner steps, by the step after which they hold, in order; 1 without."""
        return by_step(1 if self.inner_steps is None else self.inner_steps)

    @property
    def delays(self) -> bool:
        """Whether any gradient is applied in a later step."""
        return any(self.staleness_by_step.values())

    def _check_rewind(self) -> None:
        """Refuse a rule for which no old checkpoint would be there."""
        rule, checkpoint = self.failure.on_spike, self.checkpoint
        if rule is None:
            return
        if len(self.micro_batches_by_step) > 1:
            raise SpecError(
                "FailureConfig.on_spike needs steps of one size, and the batch grows: leave it "
                "out, or use one number of virtual_workers and inner_steps for all steps"
            )
        if not checkpoint.enabled:
            raise SpecError(
                "FailureConfig.on_spike goes back to a checkpoint, and the job makes none: set "
                "CheckpointConfig.every_steps or every_s"
            )
        keep, every = checkpoint.num_to_keep, checkpoint.every_steps
        if keep is None or every is None or checkpoint.keep_every is not None:
            return
        if (steps := (keep - 1) * every) < rule.before:
            raise SpecError(
                f"FailureConfig.on_spike goes back {rule.before} steps, and the {keep} checkpoints "
                f"that are kept go back {steps}: raise CheckpointConfig.num_to_keep (None: all), "
                "or lower Rewind.before"
            )

    def _check_together(self) -> None:
        processes = self.scaling.processes_per_worker
        given = {  # value, whether it is what works with everything
            "exact": (self.exact, self.exact),
            "wire": (self.wire, self.wire is None),
            "sharding": (self.sharding, self.sharding is None),
            "staleness": (self.staleness, not self.delays),
            "inner_steps": (self.inner_steps, self.inner_steps is None),
            _PROCESSES: (processes, processes == 1),
        }
        for one, other, why in _NOT_TOGETHER:
            (value, is_plain), (another, is_other_plain) = given[one], given[other]
            if not is_plain and not is_other_plain:
                raise SpecError(
                    f"{one} is {value!r} and {other} is {another!r}"
                    f"{why or ', which do not work together yet:'} leave out one of the two"
                )
        if processes > 1 and self.data.tail != "drop":
            raise SpecError(
                f"{_PROCESSES} is {processes} and the data's tail is {self.data.tail!r}: each "
                'process needs rows in each micro-batch, so use tail="drop"'
            )


def _instead_of_loader(loader: Any) -> str:
    name, size = type(loader.dataset).__name__, f"micro_batch_size={loader.batch_size or 1}"
    if hasattr(loader.dataset, "__iter__") or not hasattr(loader.dataset, "__getitem__"):
        return (
            f"data is a DataLoader over a {name}, whose rows have no index. Write them as shards "
            f'once, by elastic_dp.dataprep.write_shards, and pass data=DataConfig("shards", {size})'
        )
    return (
        "data is a DataLoader, which one worker reads; pass its dataset: "
        f"data=MapStyleData({name}(...), {size}), with its collate_fn, its num_workers as workers, "
        "and shuffle=False if it does not shuffle. Whatever its sampler, each row comes once an "
        "epoch. The global batch is virtual_workers × micro_batch_size rows"
    )


def _check_delay(name: str, value: Any) -> None:
    whole_number(name, value, 0)
    if value not in (0, 1):
        raise SpecError(f"{name} is {value}, must be 0 or 1")


def _at_least_one(name: str, value: Any) -> None:
    whole_number(name, value, 1)


def _holding(numbers: Mapping[int, int], step: int) -> int:
    """The number that holds after `step`."""
    return numbers[max(begin for begin in numbers if begin <= step)]
