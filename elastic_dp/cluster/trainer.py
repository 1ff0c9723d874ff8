"""What a user's script calls: `ElasticTrainer(...).fit()`, and the `Run` that `start()` gives.

Everything that can be wrong with a job is found here, before anything starts.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import cloudpickle

import elastic_dp.errors as errors
from elastic_dp.cluster.controller import Outcome
from elastic_dp.cluster.record import Result, RunRecord, read_result, write_result
from elastic_dp.cluster.worker import pick_device, prepare_environment
from elastic_dp.data import open_data
from elastic_dp.errors import ClusterError, SpecError, TrainError, UserCodeError
from elastic_dp.spec import (
    CheckpointConfig,
    DataConfig,
    FailureConfig,
    JobSpec,
    MapStyleData,
    ScalingConfig,
)
from elastic_dp.telemetry.journal import Journal
from elastic_dp.telemetry.progress import Progress
from elastic_dp.train.faults import Fault
from elastic_dp.train.run import LocalRun, TrainFunction

_FOLLOW_S = 1.0


class ElasticTrainer:
    """A job: a train function, its data, and how it may scale.

    `train(ctx)` runs in every worker. A run is (`storage_path`, `name`): running a finished one again returns
    its stored result. `config` is handed to the train function as `ctx.config`. With `exact=True` the result
    is the same to the last bit on any fleet of one kind of machine. The run ends after `max_steps`, the data's
    `epochs`, `max_time_s`, or `ctx.stop`, whichever comes first. `runtime_env` is Ray's, for workers and controller.
    """

    def __init__(
        self,
        train: TrainFunction,
        *,
        data: DataConfig | MapStyleData,
        name: str | None = None,
        storage_path: str | None = None,
        config: Mapping[str, Any] | None = None,
        scaling: ScalingConfig | None = None,
        checkpoint: CheckpointConfig | None = None,
        failure: FailureConfig | None = None,
        exact: bool = True,
        max_steps: int | None = None,
        max_time_s: float | None = None,
        loggers: Sequence[Callable[[Mapping[str, Any]], None]] = (),
        labels: Mapping[str, str] | None = None,
        runtime_env: Mapping[str, Any] | None = None,
    ) -> None:
        if not callable(train):
            raise SpecError(
                f"train is a {type(train).__name__}, must be a function of one argument (ctx)"
            )
        self.train = train
        self.spec = JobSpec(
            name=name or f"{getattr(train, '__name__', 'run')}-{time.strftime('%Y%m%d-%H%M%S')}",
            data=data,
            config=dict(config or {}),
            scaling=scaling or ScalingConfig(),
            checkpoint=checkpoint or CheckpointConfig(),
            failure=failure or FailureConfig(),
            exact=exact,
            max_steps=max_steps,
            max_time_s=max_time_s,
        )
        self.storage_path = storage_path or os.path.expanduser("~/elastic_dp_runs")
        self.loggers = tuple(loggers)
        self.labels = dict(labels or {})
        self.runtime_env = dict(runtime_env or {})

    @property
    def url(self) -> str:
        """The run's folder."""
        return f"{self.storage_path.rstrip('/')}/{self.spec.name}"

    def fit(self, local: bool = False) -> Result:
        """Train to the end. `local`: in this process, without Ray; the same bits."""
        if local:
            return self._fit_local()
        run = self.start()
        return run.result(progress=Progress())

    def start(self, *, faults: Sequence[Fault] = ()) -> Run:
        """Start the run on Ray (a local one, if none is connected) and return at once.

        `faults` are for tests: where workers die or freeze, by point, step and rank.
        """
        data = open_data(self.spec.data, virtual_workers=self.spec.scaling.num_virtual_workers)
        pickled = self._pickle()
        stored = self._check_record(data)
        if stored is not None:
            return Run(self, None, stored)
        return Run(self, _start_controller(self, pickled, data.manifest, tuple(faults)), None)

    # ------------------------------------------------------------------------------ private

    def _fit_local(self) -> Result:
        prepare_environment(os.environ, self.spec.scaling.num_threads)  # type: ignore[arg-type]
        data = open_data(self.spec.data, virtual_workers=self.spec.scaling.num_virtual_workers)
        stored = self._check_record(data)
        if stored is not None:
            return stored
        started_at = time.time()
        journal, progress = Journal(self.url), Progress()
        device = pick_device(self.spec.scaling.resources_per_worker)
        run = LocalRun(self.spec, data, device)

        def show(record: dict[str, Any]) -> None:
            journal.metrics(record["step"], {k: v for k, v in record.items() if k != "step"})
            progress.show(record)
            for logger in self.loggers:
                logger(record)

        run.on_log = show
        try:
            session = run.run(self.train)
        finally:
            journal.close()
            data.close()
        because = tuple(dict.fromkeys(session.inexact_because))
        metrics = {k: v for record in run.logged for k, v in record.items() if k != "step"}
        result = Result(
            name=self.spec.name,
            path=self.url,
            step=session.place.step,
            reason=session.ended or "",
            weights_sha256=run.digest,
            exact=self.spec.exact and not because,
            inexact_because=because,
            metrics=metrics,
            generations=session.generation,
            workers_lost=0,
            wall_s=time.time() - started_at,
        )
        write_result(self.url, result)
        return result

    def _pickle(self) -> bytes:
        try:
            with _by_value(self.train):
                return bytes(cloudpickle.dumps((self.spec, self.train)))
        except Exception as error:  # pickling runs the user's own code
            raise SpecError(
                f"train, config or data cannot be sent to workers: {type(error).__name__}: {error}. Open files, "
                "locks and connections inside the train function, not outside of it"
            ) from error

    def _check_record(self, data: Any) -> Result | None:
        """The stored result of a finished run; raises RunMismatch for another job's run."""
        record = RunRecord(
            virtual_workers=self.spec.scaling.num_virtual_workers,
            micro_batch_size=self.spec.data.micro_batch_size,
            seed=self.spec.data.seed,
            data=data.fingerprint,
            exact=self.spec.exact,
        )
        record.check_or_write(self.url)
        result = read_result(self.url)
        wanted = self.spec.max_steps
        if result is not None and wanted is not None and result.step < wanted:
            return None  # a longer run than the stored one
        return result


class Run:
    """A run that goes on by itself. All methods may be called from any driver thread."""

    def __init__(self, trainer: ElasticTrainer, controller: Any, stored: Result | None) -> None:
        self._trainer, self.controller, self._stored = trainer, controller, stored

    def status(self) -> dict[str, Any]:
        """Phase and why, generation, world size, step, workers by stage, newest metrics."""
        return self._ask("status") if self.controller else {"phase": "over", "reason": "finished"}

    def scale(self, size: int) -> None:
        """Ask for `size` workers from now on, within 1..virtual_workers."""
        limit = self._trainer.spec.scaling.num_virtual_workers
        if not 1 <= size <= limit:
            raise SpecError(f"size is {size}, must be within 1..{limit} (virtual_workers)")
        self._ask("scale", size)

    def stop(self, reason: str = "asked by an operator") -> None:
        """End the run at the next step; `result()` returns it."""
        self._ask("stop", reason)

    def drain(self, worker: str, within_s: float | None = None) -> None:
        """Let one worker leave once it is replaced, or in time before `within_s` have passed."""
        self._ask("drain", worker, within_s)

    def pids(self) -> dict[str, int]:
        """The process id of each worker that is up."""
        return self._ask("pids")

    def events(self) -> Iterator[dict[str, Any]]:
        """Every event, decision and metric as it comes, to the end of the run."""
        import ray

        position, ended = 0, False
        while self.controller is not None:
            position, lines = ray.get(self.controller.follow.remote(position, _FOLLOW_S))
            yield from lines
            if ended and not lines:
                return
            ended = ray.get(self.controller.wait.remote(0.0)) is not None

    def result(self, *, progress: Progress | None = None) -> Result:
        """Wait for the end. Raises UserCodeError, another TrainError, or ClusterError where it failed."""
        if self._stored is not None:
            return self._stored
        import ray

        for line in self.events():
            if progress is not None:
                progress.show(line)
            if "event" not in line and "command" not in line:
                for logger in self._trainer.loggers:
                    logger(line)
        outcome: Outcome = ray.get(self.controller.wait.remote(None))
        logged = ray.get(self.controller.status.remote())["metrics"]
        ray.get(self.controller.close.remote())
        ray.kill(self.controller)
        self.controller = None
        if outcome.error is not None:
            raise error_of(outcome)
        self._stored = Result(
            name=self._trainer.spec.name,
            path=self._trainer.url,
            step=outcome.step,
            reason=outcome.reason,
            weights_sha256=outcome.digest,
            exact=self._trainer.spec.exact and not outcome.inexact_because,
            inexact_because=outcome.inexact_because,
            metrics=logged,
            generations=outcome.generations,
            workers_lost=outcome.workers_lost,
            wall_s=outcome.wall_s,
        )
        write_result(self._trainer.url, self._stored)
        return self._stored

    def _ask(self, method: str, *args: Any) -> Any:
        import ray

        if self.controller is None:
            raise ClusterError(
                f"the run {self._trainer.spec.name!r} is over; {method} needs a live one"
            )
        return ray.get(getattr(self.controller, method).remote(*args))


@contextlib.contextmanager
def _by_value(train: TrainFunction) -> Iterator[None]:
    """Send the train function's own module along, unless it is an installed one that workers have, too."""
    module = sys.modules.get(getattr(train, "__module__", ""))
    path = getattr(module, "__file__", None)
    if module is None or path is None or module.__name__ == "__main__" or "site-packages" in path:
        yield
        return
    cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def error_of(outcome: Outcome) -> Exception:
    """The exception a failed run raises in the driver."""
    text = outcome.error or ""
    kind, _, message = text.partition(": ")
    known = getattr(errors, kind, None)
    if isinstance(known, type) and issubclass(known, SpecError | TrainError):
        if known is not UserCodeError:
            return known(message)
    elif outcome.traceback:
        return UserCodeError(outcome.error_worker, text, outcome.traceback)
    return ClusterError(text)


def _start_controller(
    trainer: ElasticTrainer, pickled: bytes, manifest: Any, faults: tuple[Fault, ...]
) -> Any:
    import ray

    from elastic_dp.cluster.ray_actors import NAMESPACE, ControllerActor

    if not ray.is_initialized():
        if "RAY_ADDRESS" in os.environ:
            ray.init(log_to_driver=False)
        else:
            ray.init(address="local", log_to_driver=False, include_dashboard=False)
    name = f"{trainer.spec.name}/controller"
    with contextlib.suppress(ValueError):
        ray.get_actor(name, namespace=NAMESPACE)
        raise ClusterError(
            f"a run named {trainer.spec.name!r} is live on this cluster; wait for it, stop it, or give this "
            "one another name"
        )
    token = secrets.token_hex(8)
    run = f"{trainer.spec.name}-{token[:4]}"
    controller = ControllerActor.options(  # type: ignore[attr-defined]
        name=name, namespace=NAMESPACE, lifetime="detached", runtime_env=trainer.runtime_env or None
    ).remote(pickled, manifest, run, token, trainer.url, faults)
    ray.get(controller.start.remote())
    return controller
