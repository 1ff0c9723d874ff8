"""The entry point of a user's script: `ElasticTrainer(...).fit()`, or `start()`, which returns a
`Run`.

Errors in a job are found here, before anything starts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from types import MethodType
from typing import Any, Literal

from elastic_dp.checkpoint.catalog import Catalog
from elastic_dp.checkpoint.storage_probe import probe
from elastic_dp.cluster import console
from elastic_dp.cluster import overrides as set_options
from elastic_dp.cluster.logger_threads import LoggerThreads, catch_up
from elastic_dp.cluster.run_handle import Run
from elastic_dp.cluster.runs.rewind import rewind
from elastic_dp.cluster.runs.run_history import StartRecord, last_start
from elastic_dp.cluster.worker import prepare_environment
from elastic_dp.config import (
    CheckpointConfig,
    DataConfig,
    FailureConfig,
    JobSpec,
    MapStyleData,
    ScalingConfig,
)
from elastic_dp.config.removed_names import refuses_removed_names
from elastic_dp.coordinator import messages as m
from elastic_dp.data import MicroBatchStream, open_data
from elastic_dp.data.datasets.map_style import probed_rows
from elastic_dp.device.gpu import is_gpu, pick_device
from elastic_dp.distributed.nccl_environment import set_default_environment
from elastic_dp.errors import Interrupted, RewindRequested, RunMismatch, SpecError
from elastic_dp.module_pickling import pickle_with_modules
from elastic_dp.run_record import (
    LEFT_OUT,
    Result,
    RunLimits,
    RunRecord,
    default_storage_path,
    run_url,
    stored_index,
    stored_result,
    virtual_workers_of,
    write_result,
)
from elastic_dp.storage import StorageURL, Store, redact_url
from elastic_dp.storage.json_files import path_in
from elastic_dp.telemetry.journal import Journal
from elastic_dp.telemetry.progress import ProgressPrinter
from elastic_dp.telemetry.run_logger import RunLogger
from elastic_dp.torch_settings import settings_of_script
from elastic_dp.train.checkpointing.job_match import check_growth, job_identity
from elastic_dp.train.exactness.machine_kind import why_inexact
from elastic_dp.train.fault_injection import WorkerFault
from elastic_dp.train.interruption import INTERRUPTED_REASON
from elastic_dp.train.local_run import LocalRun
from elastic_dp.train.steps_arguments import check_function
from elastic_dp.train.train_function import TrainFunction

_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_unnamed: dict[str, ElasticTrainer] = {}  # runs of this process that their script has named


@refuses_removed_names
class ElasticTrainer:
    """A job: a train function, its data, and how it may scale.

    A run is identified by (`storage_path`, `name`); without `name`, the script's file names it.
    Starting a finished run again returns its stored result, unless a limit was raised since; a run
    that was stopped continues. The run ends after `max_steps`, the data's `epochs`, `max_time_s`
    seconds, or `ctx.stop`, whichever comes first.

    - `train`: `train(ctx)` runs in every worker.
    - `config`: passed to the train function as `ctx.config`.
    - `exact`: the result is the same to the last bit for any number of workers on one kind of
      machine.
    - `sharding`: "optimizer" divides the optimizer's state among the workers, each part on two of
      them (ZeRO-1 with a backup). It needs `exact`. The weights are the same as without.
    - `wire`: "bf16" rounds each gradient and each partial sum of gradients to bfloat16, "int8" to 8
      bits, so that gradients take a half or a quarter of the bytes on the network. The result
      remains exact. Fixed at the run's first start.
    - `staleness`: 1 applies each gradient one step late, so that it is sent while the next one is
      computed; `{0: 0, 1000: 1}` does so after 1000 steps. It needs `exact`, and the result remains
      exact. Fixed at the run's first start.
    - `inner_steps`: the number of local steps that each virtual worker makes with the
      `inner_optimizer` of `ctx.steps`; the change of its weights then counts as its gradient
      (DiLoCo). `{0: 1, 1000: 8}`: one in each of the first 1000 steps, 8 in each later one. It
      needs `exact`, and the result remains exact. Fixed at the run's first start.
    - `loggers`: functions that are called with each record, and loggers of
      `elastic_dp.integrations`. They run in threads of the process that waits for the run. Their
      exceptions become warnings.
    - `runtime_env`: Ray's `runtime_env` for workers and controller.
    - `storage_options`: options for the file system of `storage_path`, such as keys and an
      endpoint. They are not part of the job and are never written.
    """

    def __init__(
        self,
        train: TrainFunction,
        *,
        data: DataConfig | MapStyleData,
        name: str | None = None,
        storage_path: str | os.PathLike[str] | None = None,
        config: Mapping[str, Any] | None = None,
        scaling: ScalingConfig | None = None,
        checkpoint: CheckpointConfig | None = None,
        failure: FailureConfig | None = None,
        exact: bool = True,
        sharding: Literal["optimizer"] | None = None,
        wire: Literal["bf16", "int8"] | None = None,
        staleness: Literal[0, 1] | Mapping[int, int] = 0,
        inner_steps: int | Mapping[int, int] | None = None,
        max_steps: int | None = None,
        max_time_s: float | None = None,
        loggers: Sequence[RunLogger | Callable[[Mapping[str, Any]], None]] = (),
        runtime_env: Mapping[str, Any] | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        check_function("train", train, 1, "one argument (ctx)")
        for field, given in {
            "config": config,
            "runtime_env": runtime_env,
            "storage_options": storage_options,
        }.items():
            if not isinstance(given, Mapping | None):
                raise SpecError(f"{field} is a {type(given).__name__}, must be a dict")
        sent = runtime_env or {}
        for each in (sent.get("working_dir"), *(sent.get("py_modules") or ())):
            if each is not None and "://" not in str(each):
                raise SpecError(
                    f"runtime_env has {each!r}, but Ray sends what is here for a whole job only: "
                    "give it to ray.init(runtime_env=…) before the run starts. Modules that this "
                    "process has imported are sent without it"
                )
        if not isinstance(loggers, Sequence) or not all(
            isinstance(each, RunLogger) or (callable(each) and not isinstance(each, type))
            for each in loggers
        ):
            raise SpecError(
                f"loggers is {loggers!r}, must be a list of functions of one dict, or of loggers "
                "of elastic_dp.integrations"
            )
        if not isinstance(storage_path, str | os.PathLike | None) or storage_path == "":
            raise SpecError(f"storage_path is {storage_path!r}, must be a path or URL")
        self.train = train
        job: dict[str, Any] = {
            "name": _name_of_script(train) if name is None else name,
            "storage_path": default_storage_path()
            if storage_path is None
            else os.fspath(storage_path),
            "data": data,
            "config": dict(config or {}),
            "scaling": scaling or ScalingConfig(),
            "checkpoint": checkpoint or CheckpointConfig(),
            "failure": failure or FailureConfig(),
            "exact": exact,
            "sharding": sharding,
            "wire": wire,
            "staleness": staleness,
            "inner_steps": inner_steps,
            "max_steps": max_steps,
            "max_time_s": max_time_s,
        }
        job = set_options.active.applied(job)
        path: str = job.pop("storage_path")
        # User code may change the working directory while the run goes on.
        self.storage_path = path if "://" in path else os.path.abspath(path)
        self._storage_options = dict(storage_options or {})
        self.spec = JobSpec(**job)
        set_options.active.urls.append(self.url)
        self.loggers = tuple(loggers)
        self._is_named = name is not None
        self._total_steps = self.spec.max_steps  # and by epochs, once the data is open
        self.runtime_env = dict(runtime_env or {})
        self._said_of_rows: list[str] = []  # for the journal

    @property
    def url(self) -> StorageURL:
        """The run's folder."""
        return run_url(self.spec.name, self.storage_path, self._storage_options)

    def fit(self, local: bool = False) -> Result:
        """Train to the end and return the result. `local`: in this process, without Ray, with the
        same bits.

        On Ctrl-C or SIGTERM, a run that would end with this process (`local`, or on a Ray that this
        process started) makes a checkpoint first, and continues from there when it is started
        again; a second signal ends it at once. On a cluster the run continues. `fit` then raises
        Interrupted, a KeyboardInterrupt that prints no traceback.
        """
        while True:
            progress = ProgressPrinter()
            try:
                return self._fit_local(progress) if local else self._fit_on_ray(progress)
            except KeyboardInterrupt as error:
                code = error.code if isinstance(error, Interrupted) else 128 + signal.SIGINT
                raise Interrupted(code) from None
            except RewindRequested as wish:
                step = rewind(self.url, wish.to_step, (wish.first, wish.last))
                progress.say(f"{wish}: going on from step {step}")

    def start(self, *, faults: Sequence[WorkerFault] = ()) -> Run:
        """Start the run on Ray and return at once; a live run is attached to.

        If no cluster is connected, a local one is started. `faults` are for tests: where workers
        die or freeze, by point, step and rank.
        """
        self._adopt_fixed_fields()
        with contextlib.closing(self._open_data()) as data:
            pickled = self._pickle()
            stored = self._check_and_record(data)
            self._total_steps = self._steps_by_limits(data)
            if stored is not None:
                catch_up(self.loggers, self.spec.name, self.url)
                return Run(self.spec, self.url, stored=stored)
            from elastic_dp.cluster.runs import attach  # ray, which fit(local=True) does without
            from elastic_dp.cluster.runs.ray_kv_state import StoredJob

            secret, record = secrets.token_bytes(32), self._record(data)
            start, before = StartRecord.of(self.spec, self.train, data.steps_of), self._last_start
            job = StoredJob(pickled, data.index, secret, self.url, tuple(faults), record, start)
            if set_options.active.restarts:
                attach.stop_live(self.spec.name, self.url)
            controller, is_new = attach.find_or_start(self.spec, job, self.runtime_env)
            for note in self._notes_of(start, before) if is_new else ():
                controller.tell.remote("say", note)
            return Run(self.spec, self.url, controller, self.loggers, is_new=is_new)

    # ------------------------------------------------------------------------------ private

    def _fit_on_ray(self, progress: ProgressPrinter) -> Result:
        run = self.start()
        if run.controller is None:
            progress.say(console.stored(run.result()))
            return run.result()
        progress.expect(self._total_steps)
        progress.say(console.start_on_ray(self.spec.name, self.url, run.is_new))
        with console.sigterm_interrupts():  # Ray has set a handler of its own by now
            try:
                result = run.result(progress=progress)
            except KeyboardInterrupt:
                progress.flush()
                run.interrupted(progress)
                raise
            finally:
                progress.flush()
        progress.say(console.where_weights_are(result))
        return result

    def _adopt_fixed_fields(self) -> None:
        """Take the fields that this job leaves open from the run's first start, what the run leaves
        out, and what the script has set in torch.
        """
        self.spec = dataclasses.replace(
            self.spec,
            left_out=Catalog(Store(self.url)).left_out(),
            torch_settings=settings_of_script(),
        )
        scaling = self.spec.scaling
        fixed = virtual_workers_of(self.url) if scaling.virtual_workers is None else None
        if fixed is None:
            return
        if fixed < scaling.max_workers:
            raise RunMismatch(
                f"max_workers is {scaling.max_workers}, but the run at "
                f"{redact_url(self.url)} was started with "
                f"virtual_workers={fixed}, which are fixed from then on: lower max_workers "
                f"to at most {fixed}, "
                "or use a new name= for a new run"
            )
        before = self._last_start
        growth = {} if before is None else {int(s): n for s, n in before.growth.items()}
        by_step = {0: fixed, **growth}
        scaling = dataclasses.replace(scaling, virtual_workers=by_step if growth else fixed)
        self.spec = dataclasses.replace(self.spec, scaling=scaling)

    def _open_data(self, **options: Any) -> MicroBatchStream:
        return open_data(
            self.spec.data,
            virtual_workers=self.spec.micro_batches_by_step,
            timeout_s=self.spec.failure.storage_timeout_s,
            known=stored_index(self.url),
            left_out=self.spec.left_out,
            **options,
        )

    def _fit_local(self, progress: ProgressPrinter) -> Result:
        if self.spec.scaling.processes_per_worker > 1:
            raise SpecError(
                "fit(local=True) runs in one process, and ScalingConfig.processes_per_worker is "
                f"{self.spec.scaling.processes_per_worker}: call fit(), which starts a local Ray"
            )
        if set_options.active.restarts:
            raise SpecError("--restart is for runs on Ray, and this script calls fit(local=True)")
        self._adopt_fixed_fields()
        prepare_environment(os.environ, self.spec.scaling.num_threads)
        set_default_environment(os.environ)
        device = pick_device(self.spec.scaling.resources_per_worker)

        def say(text: str) -> None:
            progress.show({"command": "Explain", "text": text})

        data = self._open_data(pin=is_gpu(device), on_wait=say)
        stored = self._check_and_record(data)
        if stored is not None:
            data.close()
            catch_up(self.loggers, self.spec.name, self.url)
            progress.say(console.stored(stored))
            return stored
        progress.expect(self._steps_by_limits(data))
        progress.say(console.start_of_local(self.spec.name, self.url))
        started_at = time.time()
        journal = Journal(self.url)
        loggers = LoggerThreads(self.loggers, self.spec.name, self.url)
        journal.listen(loggers.put)
        start = StartRecord.of(self.spec, self.train, data.steps_of)
        for note in self._notes_of(start, self._last_start):
            journal.command(m.Explain(note))

        def tell(text: str) -> None:
            journal.command(m.Explain(text))
            say(text)

        def show(record: dict[str, Any]) -> None:
            journal.metrics(record["step"], {k: v for k, v in record.items() if k != "step"})
            progress.show(record)

        def check() -> None:
            self._record(data).check_or_write(self.url, data.index)
            start.write(Store(self.url))

        run = LocalRun(self.spec, data, device, on_log=show, on_say=tell, url=self.url, check=check)
        try:
            session = run.run(self.train)
        except KeyboardInterrupt:
            journal.command(m.FinishRun(m.TrainingPosition(run.step), "", INTERRUPTED_REASON))
            progress.flush()
            progress.say(console.what_was_kept(self.url, run.step))
            raise
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            at = m.TrainingPosition(run.step)
            journal.event(m.WorkerStopped("w1", 1, at, True, text))
            journal.command(m.FailRun(text, ""))
            raise
        finally:
            progress.flush()
            journal.close()
            loggers.close()
            data.close()
        because = why_inexact(session.state.inexact_because, session.state.kinds)
        metrics = {k: v for record in run.logged for k, v in record.items() if k != "step"}
        result = Result(
            name=self.spec.name,
            path=self.url,
            step=session.position.step,
            reason=session.progress.ended or "",
            weights_sha256=run.digest,
            exact=self.spec.exact and not because,
            inexact_because=because,
            skipped=session.skipped,
            metrics=metrics,
            generations=session.generation,
            workers_lost=0,
            wall_s=time.time() - started_at,
        )
        write_result(self.url, result, RunLimits.of(self.spec))
        progress.say(f"run {result.name} finished after step {result.step}: {result.reason}")
        progress.say(console.where_weights_are(result))
        return result

    def _pickle(self) -> bytes:
        return pickle_with_modules((self.spec, self.train), "train, config or data")

    def _check_and_record(self, data: MicroBatchStream) -> Result | None:
        """Return the stored result of a finished run, or None.

        Raises RunMismatch if the run belongs to another job, StorageError if the run's folder
        cannot be used. SpecError for the second run of a script that names none.
        """
        if not self._is_named and _unnamed.setdefault(str(self.url), self) is not self:
            raise SpecError(
                f"this script has two runs without a name, which would both be {self.url}: give "
                "each a name="
            )
        store = Store(self.url)
        probe(store, secrets.token_hex(8))
        self._record(data).check_or_write(self.url, data.index)
        if self.spec.left_out:
            rows = "".join(f"{line}\n" for line in data.left_out())
            store.write(path_in(store, LEFT_OUT), rows.encode())
            steps = " and ".join(f"{first} to {last}" for first, last in self.spec.left_out)
            self._said_of_rows.append(
                f"the run was rewound: it leaves out the rows of steps {steps}, which {LEFT_OUT} "
                "in its folder lists"
            )
        stored = stored_result(self.url, RunLimits.of(self.spec), data.steps_of)
        before = self._last_start
        if before is not None and before.growth != self.spec.scaling.growth:
            made = [name.step for name in Catalog(Store(self.url)).names()]
            step = max(made, default=0) if stored is None else stored.step
            check_growth(before.growth, self.spec.scaling.growth, step)
        if stored is not None and before is not None:
            for text in StartRecord.of(self.spec, self.train).code_changed(before):
                console.warn_at_call(f"{text}; the stored result is returned all the same")
        return stored

    def _steps_by_limits(self, data: MicroBatchStream) -> int | None:
        """Return the number of steps of the run by `max_steps` and epochs; None: only time limits
        it.
        """
        steps = RunLimits.of(self.spec).steps(data.steps_of)
        return int(steps) if steps < math.inf else None

    def _record(self, data: MicroBatchStream) -> RunRecord:
        return RunRecord(
            data=data.fingerprint,
            left_out=self.spec.left_out,
            rows=self._probed_rows,
            **job_identity(self.spec),
        )

    @cached_property
    def _probed_rows(self) -> dict[str, str]:
        if not isinstance(self.spec.data, MapStyleData):
            return {}
        rows, left_out = probed_rows(self.spec.data)
        if left_out:
            self._said_of_rows.append(left_out)
        return rows

    @property
    def _last_start(self) -> StartRecord | None:
        return last_start(Store(self.url))

    def _notes_of(self, start: StartRecord, before: StartRecord | None) -> list[str]:
        """Return what is said of this start, for the journal: of the rows, and what has changed
        since the last one.

        Changes that may be unintended are also warnings.
        """
        notes = list(self._said_of_rows)
        if before is None:
            return notes
        if not Catalog(Store(self.url)).names():
            notes.append("the run was started before and has no checkpoint: it begins at step 1")
        for text, may_be_a_mistake in start.changes(before):
            notes.append(f"since the last start of this run: {text}")
            if may_be_a_mistake:
                console.warn_at_call(notes[-1])
        return notes


def _name_of_script(train: Any) -> str | None:
    """Return the name of the file that `train` is from, so that a script that is started again has
    the same run; None if there is no file, as in a notebook.
    """
    while isinstance(train, partial | MethodType):
        train = train.func if isinstance(train, partial) else train.__func__
    code = getattr(train, "__code__", None) or getattr(type(train).__call__, "__code__", None)
    file = getattr(code, "co_filename", "")
    if file.startswith(_PACKAGE):  # of an adapter: the script itself
        file = getattr(sys.modules.get("__main__"), "__file__", None) or ""
    if not os.path.isfile(file):
        return None
    return os.path.splitext(os.path.basename(file))[0]
