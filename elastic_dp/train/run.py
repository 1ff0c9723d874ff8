"""Runs a user's train function in this process: as a worker of a group, or alone (`fit(local=True)`)."""

from __future__ import annotations

import contextlib
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch

from elastic_dp.checkpoint.catalog import Catalog
from elastic_dp.coordinator.messages import (
    Event,
    Member,
    Membership,
    TrainingPosition,
    WorkerFailed,
    WorkerFinished,
    WorkerReady,
    WorkerStopped,
)
from elastic_dp.data.pipeline.global_generators import seed_everything
from elastic_dp.distributed.process_group import Rendezvous
from elastic_dp.errors import ElasticError, Interrupted, LeaseLost, LoopError, UserCodeError
from elastic_dp.sampling.seeds import seed_for
from elastic_dp.spec import JobSpec
from elastic_dp.storage import Store
from elastic_dp.train.checkpoints import Checkpoints
from elastic_dp.train.committing import CheckpointCommitter
from elastic_dp.train.context import TrainContext
from elastic_dp.train.control import ORPHANED, Control, Released
from elastic_dp.train.kind import Determinism
from elastic_dp.train.link import Link, Written
from elastic_dp.train.session import Session
from elastic_dp.train.step import BatchSource

TrainFunction = Callable[[TrainContext], None]
TIME_IS_UP = "max_time_s reached"
_SAY_AGAIN_S = 5.0
INTERRUPTED = "stopping after this step, with a checkpoint; press Ctrl-C again to end at once"


def is_ours_to_handle(number: signal.Signals) -> bool:
    """In the main thread, where the script has not set a handler of its own. (Ray sets one, which exits at once.)"""
    if threading.current_thread() is not threading.main_thread():
        return False
    present = signal.getsignal(number)
    plain = present in (signal.SIG_DFL, signal.default_int_handler)
    return plain or getattr(present, "__module__", "").startswith("ray.")


def run_worker(train: TrainFunction, session: Session) -> str:
    """Until this worker is released; returns why. What user code raises is posted, not raised."""
    with Determinism(session.spec.exact) as determinism:
        session.inexact_because = determinism.because
        try:
            try:
                _call(train, session)
            except (Exception, SystemExit) as error:  # the user's code may raise anything
                return fail_worker(session.worker, session.link, session.control, error)
            session.linger()
        except Released as released:
            return str(released)
        finally:
            if session.checkpoints is not None:
                session.checkpoints.close()


def fail_worker(worker: str, link: Link, control: Control, error: Exception | SystemExit) -> str:
    """Say what went wrong, again and again, since there may be another controller by now; returns why it was released."""
    failure = _failure(worker, error)
    try:
        while control.orphaned_in_s() > 0:
            link.post(failure)
            control.wait_for_release(min(_SAY_AGAIN_S, control.orphaned_in_s()))
        return ORPHANED
    except Released as released:
        return str(released)


def _call(train: TrainFunction, session: Session) -> None:
    """The train function, with what it must and must not have done afterwards."""
    seed_everything(seed_for(session.spec.data.seed, 0, 0))
    train(TrainContext(session))
    if session.failure is not None:
        raise session.failure
    if not session.opened:
        raise LoopError(
            "the train function returned without a loop over ctx.steps(model, optimizer, loss_fn)"
        )
    if not session.exhausted:
        raise LoopError(
            f"the loop over ctx.steps was left after step {session.position.step}, before its end. To end the run "
            "early on all workers call ctx.stop(reason) and let the loop go on; it ends by itself"
        )


def _failure(worker: str, error: Exception | SystemExit) -> WorkerFailed:
    if isinstance(error, UserCodeError):  # raised where the data is made, maybe in another process
        where = f", {error.worker}" if error.worker else ""
        return WorkerFailed(worker, error.description + where, error.remote_traceback)
    facts = None
    if isinstance(error, ElasticError):
        kind = next(c for c in type(error).__mro__ if c.__module__ == ElasticError.__module__)
        text, facts = f"{kind.__name__}: {error}", error.args
    elif isinstance(error, SystemExit):
        text = (
            f"SystemExit: the train function asked to exit with {error.code!r}. To end the run early on all "
            "workers call ctx.stop(reason)"
        )
    else:
        text = traceback.format_exception_only(error)[-1].strip()
    lines = traceback.format_exception(error)
    return WorkerFailed(worker, text, "".join(lines), facts)


# ------------------------------------------------------------------------------------------------ local


@dataclass
class LocalRun:
    """A group of one in this process, without Ray: the same session, with a controller of three lines."""

    spec: JobSpec
    data: BatchSource
    device: torch.device
    logged: list[dict[str, Any]] = field(default_factory=list)
    digest: str = ""
    on_log: Callable[[dict[str, Any]], None] | None = None
    on_say: Callable[[str], None] | None = None
    url: str | None = None  # the run's folder; None: nothing is kept
    check: Callable[[], None] = lambda: None  # under the run's lease: whether it is of this job

    def __post_init__(self) -> None:
        self.control = Control()
        self._generation = 0
        self._failure: Exception | None = None
        self._session: Session | None = None
        self._checkpoints: Checkpoints | None = None
        self._committer: CheckpointCommitter | None = None
        if self.url is not None:
            timeout_s = self.spec.failure.storage_timeout_s
            catalog = Catalog(Store(self.url, timeout_s=timeout_s, on_wait=self.say))
            kept = Checkpoints(catalog, self.spec.checkpoint, "w1", self)
            self._checkpoints = kept
            self._committer = CheckpointCommitter(
                catalog,
                self.spec.checkpoint,
                lease_s=self.spec.failure.run_lease_s,
                ask=lambda worker, step, parts: kept.write(step, parts),
                want=self.control.keep,
                tell=self.say,
                on_commit=lambda step: None,
                stand_down=lambda reason: self._fail(LeaseLost(reason)),
                fail=self._fail,
                check=lambda: self.check(),
            )

    @property
    def step(self) -> int:
        """The last one that was made."""
        return 0 if self._session is None else self._session.position.step

    def run(self, train: TrainFunction) -> Session:
        """User errors are raised as they are, for pdb and pytest. Ctrl-C and SIGTERM make a checkpoint at the head of the
        loop, and end there with Interrupted; a second one ends at once."""
        session = Session(
            spec=self.spec,
            worker="w1",
            data=self.data,
            device=self.device,
            backend="gloo",
            link=self,
            status=self,
            control=self.control,
            is_source=True,
            checkpoints=self._checkpoints,
        )
        self._session = session
        threads = torch.get_num_threads()
        torch.set_num_threads(self.spec.scaling.num_threads)
        limit = threading.Timer(self.spec.max_time_s or 0.0, self.control.stop, [TIME_IS_UP])
        if self.spec.max_time_s is not None:
            limit.start()
        try:
            with Determinism(self.spec.exact) as determinism, self._interruptible(session):
                session.inexact_because = determinism.because
                _call(train, session)
                with contextlib.suppress(Released):
                    session.linger()
                if self._failure is not None and not self.digest:  # while it was being made
                    raise self._failure
        except Released:
            if self._failure is None:
                raise
            raise self._failure from None
        finally:
            limit.cancel()
            if self._checkpoints is not None and self._committer is not None:
                self._checkpoints.close()
                self._committer.close()
            torch.set_num_threads(threads)
        return session

    @contextlib.contextmanager
    def _interruptible(self, session: Session) -> Iterator[None]:
        """Outside of the loop they end the run at once; in other threads than the main one they are what they were."""

        def interrupt(number: int, frame: FrameType | None) -> None:
            if self.control.interrupted or not session.opened or session.exhausted:
                raise Interrupted(128 + number)
            self.control.interrupted = number
            self.say(INTERRUPTED)

        both = (signal.SIGINT, signal.SIGTERM) if self._checkpoints is not None else ()
        before = {
            number: signal.signal(number, interrupt) for number in both if is_ours_to_handle(number)
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def post(self, event: Event) -> None:
        match event:
            case WorkerReady() if self._committer is not None:
                self._committer.find(
                    lambda step: self._form(TrainingPosition(0), False, step is not None)
                )
            case WorkerReady():
                self._form(TrainingPosition(0), has_state=False)
            case WorkerStopped(position=position, has_state=has_state):
                if self.control.release_reason is None:
                    self._form(position, has_state)
            case WorkerFinished(digest=digest):
                self.digest = digest
                self.control.release("finished")

    def log(self, step: int, call: int, metrics: Any) -> None:
        record = {"step": step, **metrics}
        self.logged.append(record)
        if self._committer is not None:
            self._committer.log(step, metrics)
        if self.on_log is not None:
            self.on_log(record)

    def say(self, text: str) -> None:
        if self.on_say is not None:
            self.on_say(text)

    def wrote(self, worker: str, written: Written) -> None:
        assert self._committer is not None
        self._committer.wrote(worker, written)

    def skipped(self, row_groups: Sequence[str]) -> None:
        """`Session.skipped` has them."""

    def write(self, generation: int, step: int, phase: str) -> None:
        pass

    def _fail(self, error: Exception) -> None:
        """The run's folder is not ours, or nothing can be kept there any more."""
        self._failure = error
        self.control.release(str(error))

    def write_speed(self, virtual_s: float) -> None:
        pass

    def _form(self, position: TrainingPosition, has_state: bool, restore: bool = False) -> None:
        self._generation += 1
        member = Member("w1", 0, self.spec.scaling.num_virtual_workers, position, has_state)
        membership = Membership(self._generation, (member,), "w1", 60.0, restore=restore)
        self.control.form(membership, Rendezvous("127.0.0.1", 0, "local", b""))
