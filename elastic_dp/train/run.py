"""Runs a user's train function in this process: as a worker of a group, or alone (`fit(local=True)`)."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from elastic_dp.distributed.process_group import Rendezvous
from elastic_dp.errors import ElasticError, LoopError
from elastic_dp.protocol.messages import (
    Event,
    Membership,
    Place,
    Seat,
    WorkerFailed,
    WorkerFinished,
    WorkerReady,
    WorkerStopped,
)
from elastic_dp.sampling.seeds import seed_for
from elastic_dp.spec import JobSpec
from elastic_dp.train.context import TrainContext
from elastic_dp.train.control import Control, Released
from elastic_dp.train.kind import Determinism
from elastic_dp.train.session import Session
from elastic_dp.train.step import BatchSource, seed_everything

TrainFunction = Callable[[TrainContext], None]


def run_worker(train: TrainFunction, session: Session) -> str:
    """Until this worker is released; returns why. What user code raises is posted, not raised."""
    with Determinism(session.spec.exact) as determinism:
        session.inexact_because = determinism.because
        try:
            try:
                _call(train, session)
            except Exception as error:  # the user's code may raise anything
                session.link.post(_failure(session.worker, error))
                while True:
                    session.control.wait()
            session.linger()
        except Released as released:
            return str(released)


def _call(train: TrainFunction, session: Session) -> None:
    """The train function, with what it must and must not have done afterwards."""
    seed_everything(seed_for(session.spec.data.seed, 0, 0))
    train(TrainContext(session))
    if not session.opened:
        raise LoopError(
            "the train function returned without a loop over ctx.steps(model, optimizer, loss_fn)"
        )
    if not session.exhausted:
        raise LoopError(
            f"the loop over ctx.steps was left after step {session.place.step}, before its end. To end the run "
            "early on all workers call ctx.stop(reason) and let the loop go on; it ends by itself"
        )


def _failure(worker: str, error: Exception) -> WorkerFailed:
    if isinstance(error, ElasticError):
        text = f"{type(error).__name__}: {error}"
    else:
        text = traceback.format_exception_only(error)[-1].strip()
    lines = traceback.format_exception(error)
    return WorkerFailed(worker, text, "".join(lines))


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

    def __post_init__(self) -> None:
        self.control = Control()
        self._generation = 0

    def run(self, train: TrainFunction) -> Session:
        """User errors are raised as they are, for pdb and pytest."""
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
        )
        threads = torch.get_num_threads()
        torch.set_num_threads(self.spec.scaling.num_threads)
        try:
            with Determinism(self.spec.exact) as determinism:
                session.inexact_because = determinism.because
                _call(train, session)
                with contextlib.suppress(Released):
                    session.linger()
        finally:
            torch.set_num_threads(threads)
        return session

    def post(self, event: Event) -> None:
        match event:
            case WorkerReady():
                self._form(Place(0), whole=False)
            case WorkerStopped(place=place, whole=whole):
                if self.control.release_reason is None:
                    self._form(place, whole)
            case WorkerFinished(digest=digest):
                self.digest = digest
                self.control.release("finished")

    def log(self, step: int, call: int, metrics: Any) -> None:
        record = {"step": step, **metrics}
        self.logged.append(record)
        if self.on_log is not None:
            self.on_log(record)

    def write(self, generation: int, step: int, phase: str) -> None:
        pass

    def _form(self, place: Place, whole: bool) -> None:
        self._generation += 1
        seat = Seat("w1", 0, self.spec.scaling.num_virtual_workers, place, whole)
        membership = Membership(self._generation, (seat,), "w1", 60.0)
        self.control.form(membership, Rendezvous("127.0.0.1", 0, "local"))
