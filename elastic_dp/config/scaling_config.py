"""How many workers a job has, of what size, and on which nodes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from elastic_dp.config.field_checks import at_least, check_fields, valid_labels
from elastic_dp.config.removed_names import refuses_removed_names
from elastic_dp.config.schedules import by_step, check_virtual_workers
from elastic_dp.errors import SpecError


def label_values(wanted: str) -> list[str]:
    """Return the values in a text of `ScalingConfig.label_selector`: a, !a, in(a,b) or !in(a,b)."""
    values = wanted.removeprefix("!")
    if values.startswith("in(") and values.endswith(")"):
        values = values[len("in(") : -1]
    return [value.strip() for value in values.split(",")]


_AT_LEAST_ONE = (
    *("min_workers", "max_workers", "threads_per_worker"),
    *("processes_per_worker", "nodes_per_worker"),
)


@refuses_removed_names
@dataclass(frozen=True, kw_only=True)
class ScalingConfig:
    """How many workers a job has, of what size, and on which nodes.

    - `min_workers`, `max_workers`: bounds of the number of workers that train.
    - `virtual_workers`: the number V of virtual workers. The global batch is V micro-batches for
      any number of workers. Defaults to `max_workers` at the run's first start. For a batch that
      grows, a dict: `{0: 8, 2000: 16}` has 8 virtual workers in the first 2,000 steps, and 16 from
      then on; at most as many workers train as the first number says.
    - `standby`: the number of workers that are kept ready without a rank, to replace lost ones.
    - `resources_per_worker`: as Ray counts them; {"CPU": 1} by default. With a "GPU" of 1, each
      worker has its own and NCCL is used; otherwise Gloo.
    - `processes_per_worker`: the number of processes of a worker, over which its model is sharded
      (see `TrainContext.mesh`). Each process has rows of its own, so a global
      batch is V × `processes_per_worker` micro-batches. On GPUs each process has one, so "GPU" is
      the same number. Fixed at the run's first start.
    - `nodes_per_worker`: the number of nodes over which a worker's processes and resources are
      divided equally.
    - `threads_per_worker`: the number of torch's threads in each process, part of the job because
      it changes bits. Default: the worker's CPUs, divided by `processes_per_worker`.
    - `stabilization_s`: how long a worker that is ready to join waits for others that will soon be
      ready, and after the last join, so that a burst of new nodes stops the group once or twice. It
      does not wait if it takes the last place, or if no other worker builds its
      model.
    - `balance`: "equal", or "measured": a slower worker runs fewer virtual workers if that makes a
      step at least a tenth shorter.
    - `priority`: among the runs of one cluster. If there is not room for all, a run shrinks towards
      its `min_workers` for one with a higher priority, and grows back. A run whose `min_workers` do
      not fit waits in a queue.

    On nodes with Ray's labels:

    - `market`: "spot", "on-demand", "spot-first" (on-demand if no spot node is available) or "any".
    - `label_selector`: other labels of its node, in Ray's syntax: {"ray.io/accelerator-type":
      "in(A100,H100)"}.
    """

    min_workers: int = 1
    max_workers: int = 1
    virtual_workers: int | Mapping[int, int] | None = None
    standby: int = 0
    resources_per_worker: Mapping[str, float] = field(default_factory=lambda: {"CPU": 1})
    processes_per_worker: int = 1
    nodes_per_worker: int = 1
    threads_per_worker: int | None = None
    stabilization_s: float = 5.0
    market: Literal["any", "spot", "on-demand", "spot-first"] = "any"
    label_selector: Mapping[str, str] = field(default_factory=dict)
    balance: Literal["equal", "measured"] = "equal"
    priority: int = 0

    def __post_init__(self) -> None:
        check_fields(self, standby=0, stabilization_s=0.0, **dict.fromkeys(_AT_LEAST_ONE, 1))
        if not isinstance(self.resources_per_worker, Mapping):
            raise SpecError(
                f"ScalingConfig.resources_per_worker is {self.resources_per_worker!r}, must "
                'be a dict of amounts, such as {"CPU": 1}'
            )
        check_virtual_workers(self.virtual_workers, "ScalingConfig.virtual_workers")
        self._check_label_selector()
        if self.min_workers > self.max_workers:
            raise SpecError(
                f"ScalingConfig.min_workers is {self.min_workers}, more than max_workers "
                f"({self.max_workers}); lower it, or raise max_workers"
            )
        if self.num_virtual_workers < self.max_workers:
            name = "virtual_workers[0]" if self.grows else "virtual_workers"
            raise SpecError(
                f"ScalingConfig.{name} is {self.num_virtual_workers}, less than max_workers "
                f"({self.max_workers}): some workers would have nothing to do; raise it to "
                f"at least {self.max_workers}, or lower max_workers"
            )
        for name, amount in self.resources_per_worker.items():
            field = f"ScalingConfig.resources_per_worker[{name!r}]"
            if not isinstance(name, str) or not name:
                raise SpecError(f"{field}: a resource's name must be a string")
            at_least(field, amount, 0)
            if name == "GPU":
                self._check_gpus(field, amount)
        self._check_nodes()

    def _check_gpus(self, field: str, amount: float) -> None:
        processes = self.processes_per_worker
        if processes == 1 and amount > 1:
            workers = math.ceil(amount) * self.max_workers
            raise SpecError(
                f"{field} is {amount!r}, and a worker trains on one GPU: ask for "
                f'"GPU": 1, and for as many workers as there are GPUs (max_workers={workers}). '
                "Or shard the model over the GPUs of a worker, with as many processes_per_worker"
            )
        if processes > 1 and amount not in (0, processes):
            raise SpecError(
                f"{field} is {amount!r} and ScalingConfig.processes_per_worker is {processes}, but "
                f'each process has a GPU of its own: ask for "GPU": {processes}, or leave it out '
                "to train on CPUs"
            )

    def _check_nodes(self) -> None:
        nodes, processes = self.nodes_per_worker, self.processes_per_worker
        given = f"ScalingConfig.nodes_per_worker is {nodes}"
        if processes % nodes:
            raise SpecError(
                f"{given} and processes_per_worker is {processes}, which must be a multiple of it: "
                "each node has the same number of processes"
            )
        if nodes > 1 and not any(self.resources_per_worker.values()):
            raise SpecError(f"{given}, so resources_per_worker must have some, by which Ray places")

    def _check_label_selector(self) -> None:
        selector = self.label_selector
        if not isinstance(selector, Mapping) or not all(
            isinstance(text, str) and text for pair in selector.items() for text in pair
        ):
            raise SpecError(
                f"ScalingConfig.label_selector is {selector!r}, must be a dict of strings, such as "
                '{"ray.io/accelerator-type": "H100"}'
            )
        for label, wanted in selector.items():
            prefix, _, key = label.rpartition("/")
            names = [*prefix.split("."), key] if prefix else [key]
            if not valid_labels([*names, *label_values(wanted)]):
                raise SpecError(
                    f"ScalingConfig.label_selector has {label!r}: {wanted!r}, but Ray "
                    "takes a label's name, and as its value a, !a, in(a,b) or !in(a,b), of up to "
                    "63 letters, digits, '-', '_' and '.' each"
                )
        if self.market != "any" and "ray.io/market-type" in selector:
            raise SpecError(
                "ScalingConfig.label_selector names ray.io/market-type, which market requests, "
                "too; use only one of them"
            )

    @property
    def num_virtual_workers(self) -> int:
        """The number of virtual workers; where the batch grows, that of the first step."""
        return self.virtual_workers_by_step[0]

    @property
    def virtual_workers_by_step(self) -> dict[int, int]:
        """The numbers of virtual workers, by the step after which they hold, in order."""
        given = self.virtual_workers
        return by_step(self.max_workers if given is None else given)

    @property
    def growth(self) -> dict[str, int]:
        """The later numbers of virtual workers, by the step after which they hold, for JSON."""
        return {str(steps): n for steps, n in [*self.virtual_workers_by_step.items()][1:]}

    @property
    def grows(self) -> bool:
        """Whether the number of virtual workers changes with the step."""
        return len(self.virtual_workers_by_step) > 1

    @property
    def resources_per_node(self) -> Mapping[str, float]:
        """What a worker needs on each of its nodes."""
        nodes, whole = self.nodes_per_worker, self.resources_per_worker
        return whole if nodes == 1 else {name: amount / nodes for name, amount in whole.items()}

    @property
    def num_threads(self) -> int:
        """The number of torch's threads in each worker."""
        if self.threads_per_worker is not None:
            return self.threads_per_worker
        cpus = self.resources_per_worker.get("CPU", 1)
        return max(1, int(cpus / self.processes_per_worker))
