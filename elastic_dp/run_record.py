"""The record of a run in its folder: the job that it belongs to and, once finished, its result.
Small JSON files.

`run.json` is only ever created, so if two drivers start at once with different jobs, one is
refused. It is compared by the driver and, once more, by the holder of the run's lease, before
training starts. Modules that need pyarrow are imported where they are used, because the command
line reads results without it.
"""

from __future__ import annotations

import dataclasses
import math
import os
import warnings
from collections.abc import Callable, Container, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from elastic_dp.config import JobSpec
from elastic_dp.errors import CheckpointError, DataError, FileDamaged, RunMismatch
from elastic_dp.storage import ObjectMissing, StorageURL, Store, redact_url
from elastic_dp.storage.json_files import make, numbers, path_in, read_json, write_json

if TYPE_CHECKING:  # they import torch or pyarrow, and a stored result is read without them
    from elastic_dp.checkpoint.catalog import Catalog
    from elastic_dp.checkpoint.commit_record import CommitRecord
    from elastic_dp.checkpoint.exporting import LoadedState
    from elastic_dp.data import Index

FORMAT = 1  # version of the JSON files here
_INDEX = "index.arrows"
_RUN, _RESULT = "run.json", "result.json"
LEFT_OUT = "left_out.txt"  # what each micro-batch that is left out consists of
_RUN_AGAIN = (
    "Delete it and start the run again with the job that it was started with: the file is "
    "written again, and the checkpoints, which name their job, are compared with it"
)
_RESULT_AGAIN = "Delete it and start the run again: it goes on from its newest checkpoint"
_LIMITS = "limits"
_LOOKS_AT_ONCE = 16


@dataclass(frozen=True)
class Result:
    """How a run ended.

    - `step`: committed steps.
    - `reason`: why it ended.
    - `weights_sha256`: digest of the names, shapes, dtypes and bytes of the final parameters and
      buffers.
    - `exact`: the weights do not depend on which workers ran; otherwise `inexact_because` says why.
    - `skipped`: row groups that could not be decoded and were left out.
    - `metrics`: the newest value of every logged metric.
    - `generations`: the number of the last generation. Some numbers may be left out: a controller
      that hears no worker for a while claims one to confirm that it leads.
    - `workers_lost`: processes lost before the end, without those that were released.
    - `wall_s`: seconds from start to end.

    On a cluster these three count all starts of the run, also those whose head node was lost.
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

    def load_state(self) -> LoadedState:
        """Return the final state, from the checkpoint of the last step, with tensors on the host.

        `model` is the model's state dict (name to tensor, for `load_state_dict`), `optimizer` and
        `scheduler` are theirs, `user` has the state dict of each object that was passed as
        `state=`; also `step` and `metrics`. Raises CheckpointError if that checkpoint was deleted,
        CheckpointDamaged, StorageError.
        """
        from elastic_dp.checkpoint.exporting import load_state

        self._final()
        return load_state(self.path, self.step)

    def export(
        self, path: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None
    ) -> None:
        """Write the final weights to a file that opens without this package, at a path or any
        fsspec URL, whose store takes `storage_options`.

        `FILE.safetensors`: one tensor for each key of the model's `state_dict()`, under that key,
        so that `model.load_state_dict(safetensors.torch.load_file(path))` takes it. `FILE.pt`: a
        dict by `torch.save` with the optimizer's state, too, and the weights under "model". Raises
        what `load_state` raises.
        """
        from elastic_dp.checkpoint.exporting import export

        destination = os.fspath(path)
        if not destination.endswith((".safetensors", ".pt")):
            raise CheckpointError(
                f"path is {destination!r}, must end in .safetensors (the weights) or .pt "
                "(the optimizer's state, too)"
            )
        export(*self._final(), StorageURL(destination, storage_options))

    def _final(self) -> tuple[Catalog, CommitRecord]:
        """The checkpoint of the last step."""
        from elastic_dp.checkpoint.catalog import Catalog

        catalog = Catalog(Store(self.path))
        names = {name.step: name for name in catalog.names()}
        if self.step in names:
            return catalog, catalog.read(names[self.step])
        there = ", ".join(map(str, names))
        way_out = (
            f"elastic_dp.load_state({redact_url(self.path)!r}, step=N) loads one of steps {there}"
            if there
            else "use a new name= to train it again"
        )
        raise CheckpointError(
            f"the run {self.name!r} has no checkpoint of its last step, {self.step}: it was "
            "deleted, could not be "
            f"written, or the run has gone on since. {way_out}"
        )


_DRAWN = (
    "A random_split that is drawn anew has other rows: give it "
    "generator=torch.Generator().manual_seed(0)."
)


@dataclass(frozen=True)
class RunRecord:
    """What determines a run's result and must not change while it keeps its name."""

    virtual_workers: int  # of the first step; how the batch grows may change, see `job_match`
    micro_batch_size: int
    seed: int
    data: str
    exact: bool
    # Absent in runs of versions that did not have them:
    wire: str | None = None
    staleness: int | dict[str, int] = 0  # see `config.schedules.stored`
    inner_steps: int | dict[str, int] | None = None
    processes_per_worker: int = 1
    default_dtype: str | None = None  # None: not known
    # Steps whose rows are left out, see `checkpoint/catalog.py`: a rewind may change them.
    left_out: tuple[tuple[int, int], ...] = field(default=(), compare=False)
    # Digests of a few rows of a map-style dataset, by their number; see `probed_rows`.
    rows: dict[str, str] = field(default_factory=dict, compare=False)

    def check_or_write(self, url: str, index: Index | None) -> None:
        """Write the record at the first start, with the data set's index; compare it at later ones,
        and what the run leaves out with what it is to leave out.

        Raises RunMismatch, which names what has changed.
        """
        from elastic_dp.checkpoint.catalog import Catalog
        from elastic_dp.data import difference

        store = Store(url)
        stored = _read_run(store)
        if Catalog(store).left_out() != self.left_out:
            raise RunMismatch(
                f"the run at {redact_url(url)} was rewound while it was being started: start it "
                "again"
            )
        values = {k: v for k, v in dataclasses.asdict(self).items() if k != "left_out"}
        if stored is None:
            try:
                write_json(store, _RUN, values, FORMAT, create_only=True)
            except FileExistsError:  # another driver was first, perhaps with another job
                stored = _read_run(store)
                if stored is None:
                    raise FileDamaged(
                        f"{store.url}/{_RUN}", "something that is no file has its name", _RUN_AGAIN
                    ) from None
            else:
                if index is not None:
                    store.write(path_in(store, _INDEX), index.to_bytes())
                return
        values["data"] = values.pop("data")  # at last: it changes with what the order depends on
        rows = values.pop("rows")
        for name, mine in values.items():
            then = getattr(stored, name)
            if then != mine and (then is not None or name != "default_dtype"):
                if name == "data" and index is not None and (old := _read_index(store)) is not None:
                    changed = difference(old, index)
                    if changed is not None:
                        raise RunMismatch(
                            f"the data set is not the one that the run at {redact_url(url)} "
                            f"was started with: {changed}. "
                            "Use a new name= for a new run, or bring the old data set back"
                        )
                    raise RunMismatch(
                        f"the rows are those of the run at {redact_url(url)}, but in another "
                        "order: an option of the data that decides it has changed (shuffle, tail, "
                        "seed, pack, weights by step), or the run was started by an earlier "
                        "version of elastic_dp, which counted the streams of large row groups "
                        "otherwise. Set the old value, go on with the old version, or use a new "
                        "name= for a new run, which may begin with the weights that `elastic-dp "
                        "checkpoints export` writes"
                    )
                if name == "data":
                    drawn = f" {_DRAWN}" if rows else ""
                    raise RunMismatch(
                        f"the data is not that of the run at {redact_url(url)}: the class, length "
                        "or `Subset` indices of MapStyleData.dataset, or shuffle, tail or "
                        "fingerprint changed. Use a new name= for a new run, or the old ones to "
                        f"continue this one.{drawn}"
                    )
                raise RunMismatch(
                    f"{name} is {mine!r}, but the run at {redact_url(url)} was started with "
                    f"{then!r}. Use a new name= for a new run, or the old value to continue this "
                    "one."
                )
        if other := [row for row, mine in rows.items() if stored.rows.get(row, mine) != mine]:
            raise RunMismatch(
                f"row {other[0]} of MapStyleData.dataset is not the one that the run at "
                f"{redact_url(url)} was started with ({len(other)} of {len(rows)} compared rows "
                f"differ). Bring the old rows back, or use a new name= for a new run. {_DRAWN} "
                "Where rows differ for a reason that does not matter, set MapStyleData.fingerprint "
                "in the new run: then only that is compared"
            )


def virtual_workers_of(url: str) -> int | None:
    """Return what the run's first start has fixed; None before it."""
    stored = _read_run(Store(url))
    return None if stored is None else stored.virtual_workers


@dataclass(frozen=True)
class RunLimits:
    """The limits of a run; None: no limit. A stored result counts until one of them is raised."""

    max_steps: int | None = None
    epochs: int | None = None
    max_time_s: float | None = None
    stopped: bool = False  # by an operator; such a run may continue with the same limits

    @classmethod
    def of(cls, spec: JobSpec, stopped: bool = False) -> RunLimits:
        return cls(spec.max_steps, spec.data.epochs, spec.max_time_s, stopped)

    def steps(self, steps_of: Callable[[int], int]) -> float:
        """`steps_of(epochs)` is the number of steps of so many epochs."""
        epochs = math.inf if self.epochs is None else steps_of(self.epochs)
        return min(epochs, math.inf if self.max_steps is None else self.max_steps)

    @property
    def time_s(self) -> float:
        return math.inf if self.max_time_s is None else self.max_time_s


def stored_result(url: str, limits: RunLimits, steps_of: Callable[[int], int]) -> Result | None:
    """Return the stored result, or None if the run may continue.

    It may if a limit was raised, or an operator stopped it, and steps are left.
    """
    result, then = _read_result(url)
    if result is None:
        return None
    steps = limits.steps(steps_of)
    raised = steps > then.steps(steps_of) or limits.time_s > then.time_s or then.stopped
    if raised and result.step < steps:
        return None
    if dataclasses.replace(then, stopped=False) != limits:
        warnings.warn(
            f"the run at {redact_url(url)} ended after step {result.step} ({result.reason}) "
            "under other limits; its result is "
            "returned, because no limit was raised that would let it continue",
            stacklevel=2,
        )
    return result


@dataclass
class RunOutcome:
    """How a run ended: `result` if it finished, `error` if it failed."""

    result: Result | None = None
    step: int = 0
    reason: str = ""
    digest: str = ""
    inexact_because: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    error: str | None = None
    error_worker: str = ""
    error_facts: tuple[str | int, ...] | None = None  # the arguments of an error of this package
    traceback: str = ""
    generations: int = 0
    workers_lost: int = 0
    wall_s: float = 0.0


def default_storage_path() -> str:
    return os.path.expanduser("~/elastic_dp_runs")


def run_url(
    name: str,
    storage_path: str | os.PathLike[str],
    storage_options: Mapping[str, Any] | None = None,
) -> StorageURL:
    """The run's folder."""
    return StorageURL(f"{os.fspath(storage_path).rstrip('/')}/{name}", storage_options)


def stored_index(url: str) -> Index | None:
    """Return the index of the run's data set, as its first start has written it."""
    return _read_index(Store(url))


def run_names(store: Store, known: Container[str] = ()) -> list[str]:
    """Returns the names of the runs at a storage path. Asks for no object of a run but its
    `run.json`, and not for that of a `known` run."""
    folders = store.look(store.path.rstrip("/"), deep=False).folders
    names = sorted(folder.rpartition("/")[2] for folder in folders)

    def is_run(name: str) -> bool:
        return name in known or store.look_up(path_in(store, f"{name}/{_RUN}")) is not None

    with ThreadPoolExecutor(_LOOKS_AT_ONCE) as pool:
        return [name for name, found in zip(names, pool.map(is_run, names), strict=True) if found]


def read_result(url: str) -> Result | None:
    return _read_result(url)[0]


def write_result(url: str, result: Result, limits: RunLimits) -> None:
    content = dataclasses.asdict(result) | {_LIMITS: dataclasses.asdict(limits)}
    write_json(Store(url), _RESULT, content, FORMAT)


def delete_result(url: str) -> None:
    """Let the run go on: its result does not count any more."""
    store = Store(url)
    store.delete(path_in(store, _RESULT))


def _read_run(store: Store) -> RunRecord | None:
    stored = read_json(store, _RUN, FORMAT, _RUN_AGAIN)
    return None if stored is None else make(RunRecord, stored, f"{store.url}/{_RUN}", _RUN_AGAIN)


def _read_result(url: str) -> tuple[Result | None, RunLimits]:
    store = Store(url)
    stored = read_json(store, _RESULT, FORMAT, _RESULT_AGAIN)
    if stored is None:
        return None, RunLimits()
    where, limits = f"{store.url}/{_RESULT}", stored.get(_LIMITS, {})
    if not isinstance(limits, dict):
        raise FileDamaged(where, f"its {_LIMITS} are {limits!r:.40}", _RESULT_AGAIN)
    result = make(Result, stored, where, _RESULT_AGAIN)
    # The folder may have been moved. `load_state` and `export` need it, and the URL's options.
    result = dataclasses.replace(result, path=url, metrics=numbers(result.metrics))
    return result, make(RunLimits, limits, f"{where} ({_LIMITS})", _RESULT_AGAIN)


def _read_index(store: Store) -> Index | None:
    """Return the stored index; None if it is missing or unreadable."""
    from elastic_dp.data import Index

    try:
        return Index.from_bytes(bytes(store.read_all(path_in(store, _INDEX))))
    except (ObjectMissing, DataError):
        return None
