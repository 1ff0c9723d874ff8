"""Runs a user's train function in a worker of a group, until the worker is released.

`Worker.run` calls it. `fit(local=True)` calls the train function without a group (local_run.py).
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

from elastic_dp.coordinator.messages import WorkerFailed
from elastic_dp.device.faults import FaultKind, broken_context, describe, fault_of
from elastic_dp.device.global_generators import open_generators, seed_everything
from elastic_dp.errors import ElasticError, Interrupted, LoopError, UserCodeError
from elastic_dp.sampling.seeds import seed_for
from elastic_dp.train.context import TrainContext
from elastic_dp.train.controller_link import ControllerLink, HeartbeatStatus
from elastic_dp.train.exactness.machine_kind import deterministic_kernels
from elastic_dp.train.generations.worker_control import ORPHANED, Released, WorkerControl
from elastic_dp.train.interruption import NO_HANDLERS, handlers
from elastic_dp.train.worker_session import WorkerSession

TrainFunction = Callable[[TrainContext], None]
_REPORT_AGAIN_S = 5.0
_OF_TENSORS = frozenset({"backward", "item", "detach", "cpu", "mean", "numpy"})
_EXIT_CODE = 70  # of a process whose device has failed (EX_SOFTWARE)


def train_until_released(train: TrainFunction, session: WorkerSession) -> str:
    """Runs the train function until this worker is released. Returns the reason. An exception of
    user code is posted, not raised."""
    kernels = deterministic_kernels(session.spec.exact, session.inexact_because, session.device)
    with kernels as session.listen_to_warnings:
        try:
            try:
                call_train_function(train, session)
            except (Released, Interrupted):
                raise
            except BaseException as error:  # the user's code may raise anything
                return fail_worker(
                    session.worker, session.link, session.control, session.status, error
                )
            try:
                session.serve_until_released()
            except Exception as error:
                exit_if_device_failed(session.status, error)
                session.control.confirm_processes()
                raise
        except Released as released:
            return str(released)
        finally:
            if session.checkpoints is not None:
                session.checkpoints.close()


def fail_worker(
    worker: str,
    link: ControllerLink,
    control: WorkerControl,
    status: HeartbeatStatus,
    error: BaseException,
) -> str:
    """Reports the error until this worker is released, or orphaned. Returns why."""
    exit_if_device_failed(status, error)
    control.confirm_processes()  # else this error may come from the loss of one
    failure = _failure(worker, error)
    try:
        while control.orphaned_in_s() > 0:
            link.post(failure)
            control.wait_for_release(min(_REPORT_AGAIN_S, control.orphaned_in_s()))
        return ORPHANED
    except Released as released:
        return str(released)


def exit_if_device_failed(status: HeartbeatStatus, error: BaseException) -> None:
    """End the process where the error is a fault of its device: the worker is lost, and no error of
    the user's code. Without any clean-up, which would call the device again and could block."""
    kind = fault_of(error)
    if kind is not None:
        _exit_for_device_fault(status, kind, error)
    broken = broken_context()  # asynchronous faults surface anywhere, also as something else
    if broken is not None:
        traceback.print_exception(error)
        _exit_for_device_fault(status, FaultKind.DEVICE, broken)


def _exit_for_device_fault(
    status: HeartbeatStatus, kind: FaultKind, error: BaseException
) -> NoReturn:
    status.write_fault(kind, describe(error))
    traceback.print_exception(error)  # its sidecar sends what was printed last
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(_EXIT_CODE)


def call_train_function(train: TrainFunction, session: WorkerSession) -> None:
    """Calls the train function and checks that it ran its loop to the end. Raises LoopError."""
    open_generators(session.device)
    seed_everything(seed_for(session.spec.data.seed, 0, 0))
    session.loop.handlers = handlers()
    try:
        train(TrainContext(session))
    except ValueError as error:
        if "signal only works in main thread" not in str(error):
            raise
        raise LoopError(NO_HANDLERS) from error
    except SystemExit as error:
        if isinstance(error, Interrupted):
            raise
        raise LoopError(
            f"the train function asked to exit with {error.code!r}. To end the run early on all "
            "workers, call ctx.stop(reason)"
        ) from error
    except AttributeError as error:
        if error.name in _OF_TENSORS and isinstance(error.obj, float) and session.loop.in_body:
            raise LoopError(
                f"the body of the loop over ctx.steps calls .{error.name}() of a number: "
                f"step.loss, step.grad_norm and metrics are floats. Leave out "
                f".{error.name}(); backward() and optimizer.step() are parts of the step"
            ) from error
        raise
    if session.loop.failure is not None:
        raise session.loop.failure
    if not session.loop.opened:
        raise LoopError(
            "the train function returned without a loop over ctx.steps(model, optimizer, loss_fn)"
        )
    if not session.loop.exhausted:
        raise LoopError(
            f"the loop over ctx.steps was left after step {session.position.step}, before its "
            "end. To end the run early on all workers, call ctx.stop(reason) and let the loop "
            "continue; it ends by itself"
        )


def _failure(worker: str, error: BaseException) -> WorkerFailed:
    if isinstance(error, UserCodeError):  # raised where the data is made, maybe in another process
        where = f", {error.worker}" if error.worker else ""
        return WorkerFailed(worker, error.description + where, error.remote_traceback)
    facts = None
    if isinstance(error, ElasticError):
        kind = next(c for c in type(error).__mro__ if c.__module__ == ElasticError.__module__)
        text, facts = f"{kind.__name__}: {error}", error.args
    else:
        text = traceback.format_exception_only(error)[-1].strip()
    lines = traceback.format_exception(error)
    return WorkerFailed(worker, text, "".join(lines), facts)
