"""The argument of a user's train function, `TrainContext`, and the `Step` that its loop yields."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh

from elastic_dp.config import DataConfig, MapStyleData
from elastic_dp.config.field_checks import check_rewind
from elastic_dp.device.gpu import is_gpu
from elastic_dp.distributed.gradient_rounding import GradientRounding
from elastic_dp.errors import LoopError, LossError, RewindRequested, SpecError
from elastic_dp.sampling.step_schedule import StepSchedule
from elastic_dp.train.state.train_state import StepRecord
from elastic_dp.train.step.micro_batch import LossFn
from elastic_dp.train.step.participants import StepParticipant
from elastic_dp.train.steps_arguments import StepsArguments
from elastic_dp.train.worker_session import WorkerSession

if TYPE_CHECKING:
    from elastic_dp.data import Evaluation

_CARRY = "carry"  # the key of `ctx.carry` in the state
_CARRIED = (bool, int, float, complex, str, bytes, type(None), list, tuple, dict, set)
_OF_A_LINE = frozenset({"time", "event", "command"})  # keys of every line of the journal
_DEEPEST = 32  # levels of a logged value
_EVALUATIONS_KEPT = 16  # data sets that are open


class Step:
    """One committed step, equal on every worker.

    - `number`: the number of the step, from 1.
    - `epoch`: the pass over the data, from 0; `epoch_end` is True on its last step.
    - `loss`, `metrics`: means over the global batch; `weight`: the sum of its weights.
    - `lr`: the learning rate of the first parameter group in this step.

    Gradients are not available in the loop's body: `p.grad` is None there. Read `grad_norm`.
    """

    def __init__(self, record: StepRecord, session: WorkerSession) -> None:
        self._record, self._session = record, session
        self.number, self.epoch, self.epoch_end = record.number, record.epoch, record.epoch_end
        self.loss, self.weight = record.loss, record.weight
        self.metrics, self.lr = record.metrics, record.lr

    @property
    def noise(self) -> NoReturn:
        raise LoopError("step.noise is gone: write noise.update(step), and read noise.value")

    @property
    def grad_norm(self) -> float:
        """The 2-norm of the gradient of the mean loss over the global batch, before clipping.

        Computed when it is first read. Raises LoopError after the step's own loop body, when the
        gradients are gone, unless it was read there or `clip_norm` needed it.
        """
        if self._session.state.record is self._record and self._session.loop.in_body:
            self._session.transaction.complete_record()
        if self._record.grad_norm is None:
            raise LoopError(
                f"grad_norm of step {self.number} is read too late: its gradients are gone; read "
                "it in the step's own loop body"
            )
        return self._record.grad_norm

    def __repr__(self) -> str:
        return f"Step(number={self.number}, epoch={self.epoch}, loss={self.loss:.6g})"


class CarriedVariables:
    """What `TrainContext.carry` returns: variables of the loop's body, as attributes."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._add(values)

    def _add(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            if name in vars(self) or hasattr(CarriedVariables, name):
                raise LoopError(f"ctx.carry got {name}, which is taken: give it another name")
            setattr(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, np.generic):
            value = value.item()
        if not isinstance(value, (*_CARRIED, torch.Tensor, np.ndarray)):
            raise LoopError(
                f"ctx.carry got {name}, which is a {type(value).__name__}: it takes numbers, "
                "strings, tensors and containers of them. Pass an object with state_dict and "
                f'load_state_dict as state={{"{name}": {name}}}'
            )
        super().__setattr__(name, value)

    def state_dict(self) -> dict[str, Any]:
        return copy.deepcopy(vars(self))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)

    def __repr__(self) -> str:
        return f"ctx.carry({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"


class TrainContext:
    """The interface between a train function and the group of workers. One per worker.

    It has the same methods with `fit(local=True)`.
    """

    def __init__(self, session: WorkerSession) -> None:
        self._session = session
        self._evaluation_data: list[tuple[Any, Evaluation]] = []
        self._told: set[str] = set()
        self._carried: CarriedVariables | None = None

    # -------------------------------------------------------------------------------- facts

    @property
    def rank(self) -> int:
        """The rank of this worker in the present generation (0 before the first). It changes; log
        with `ctx.log`."""
        self._tell_if_in_loss("ctx.rank")
        return self._session.rank

    @property
    def world_size(self) -> int:
        """The number of workers in the present generation (0 before the first)."""
        self._tell_if_in_loss("ctx.world_size")
        return self._session.world_size

    @property
    def generation(self) -> int:
        """The number of the present generation, from 1 (0 before the first)."""
        self._tell_if_in_loss("ctx.generation")
        return self._session.generation

    @property
    def device(self) -> torch.device:
        """Where this process of a worker trains: its GPU, or the CPU. Move the model there before
        the loop; tensors of a batch are there already."""
        return self._session.device

    @property
    def mesh(self) -> DeviceMesh:
        """The processes of this worker, as a mesh of one dimension for torch's `fully_shard`.

        Raises SpecError if `ScalingConfig.processes_per_worker` is 1.
        """
        if self._session.gang is None:
            raise SpecError(
                "ctx.mesh is of workers with several processes: set "
                "ScalingConfig.processes_per_worker"
            )
        return self._session.gang.mesh

    @property
    def config(self) -> Mapping[str, Any]:
        """The `config=` of the trainer."""
        return self._session.spec.config

    @property
    def seed(self) -> int:
        """The `seed` of the data's config, which also seeds `random`, NumPy and torch for each
        micro-batch and each loop body."""
        return self._session.spec.data.seed

    @property
    def total_steps(self) -> int:
        """The number of steps of the run by `max_steps` and `epochs`; 0 if only time limits it."""
        self._session.loop.read_total_steps = True
        return self._session.total_steps

    @property
    def steps_per_epoch(self) -> int:
        """The number of steps in one pass over the data, at least 1; in the first one, where the
        batch or the number of inner steps changes."""
        return self._session.data.steps_per_epoch

    @property
    def virtual_workers(self) -> dict[int, int]:
        """The number of virtual workers, by the number of steps after which it holds: `{0: 8}`, or
        more of them where the batch grows."""
        return self._session.spec.scaling.virtual_workers_by_step

    def inner_steps_before(self, step: int) -> int:
        """The number of inner steps of a virtual worker before `step`, which counts from 1; without
        `inner_steps` that of steps."""
        return StepSchedule(self._session.spec.inner_steps_by_step).total(step - 1)

    @property
    def is_source(self) -> bool:
        """Whether the run starts from this worker's initial weights; other workers receive them."""
        self._session.loop.read_is_source = True
        return self._session.is_source

    # --------------------------------------------------------------------------------- loop

    def carry(self, **values: Any) -> CarriedVariables:
        """Variables that the loop's body changes: a worker that joins and a run that goes on from
        a checkpoint have their values.

        `c = ctx.carry(best=math.inf, wait=0)` before the loop, `c.best` and `c.wait` in it. Values
        are numbers, strings, tensors, and lists, tuples, dicts and sets of them. Raises LoopError
        for other ones, and once the loop has begun.
        """
        if self._session.loop.opened:
            raise LoopError(
                "ctx.carry was called after ctx.steps: a worker that joins would not have the "
                "values of the others. Call it before the loop, with initial values"
            )
        if self._carried is None:
            self._carried = CarriedVariables(values)
        else:
            self._carried._add(values)
        return self._carried

    def steps(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        loss_fn: LossFn,
        *,
        scheduler: Any = None,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        precision: str | None = None,
        state: Mapping[str, Any] | None = None,
        noise_scale_every: int | None = None,
        inner_optimizer: Callable[[torch.nn.Module, int], torch.optim.Optimizer] | None = None,
        inner_clip_norm: float | None = None,
        participants: Sequence[StepParticipant] = (),
        rounding: Callable[[torch.dtype], GradientRounding] | None = None,
    ) -> Iterator[Step]:
        """The training loop: each committed step once, in order, whatever happens to the workers.

        `loss_fn(model, batch)` returns the mean loss of one micro-batch as a real tensor with one
        element, or (loss, weight), or (loss, weight, metrics); it may run more than once for a step
        and must be pure. `batch` is a dict of tensors on `ctx.device`, of shape (rows, ...) and the
        dtype of their column, or what `collate_fn` returned; rows are `micro_batch_size`, or fewer
        at the end of an epoch. `weight` (default: the rows) is a number of 0 to 1e30, of
        which only ratios matter; `metrics` maps names to numbers, means over the micro-batch.
        `scheduler.step()` is called after each optimizer step; gradients are gone when the body
        begins (see `Step.grad_norm`). `clip_norm`: the largest 2-norm of the gradient.
        `clip_value`: the largest absolute value of its elements. `precision`: None, "bf16" or
        "fp16" autocast. `state`: what the loop's body changes, as objects with `state_dict` and
        `load_state_dict`; joiners take it over. `noise_scale_every`: the noise of the gradient is
        measured in steps that it divides (see `NoiseScale`).

        With `ElasticTrainer(inner_steps=…)`, `optimizer` is the outer one, and
        `inner_optimizer(model, step)` returns a new optimizer for the inner steps of one virtual
        worker in this step; it must be pure. `inner_clip_norm`: the largest 2-norm of the gradient
        of an inner step.

        `participants`: what else the members are to agree on before a step is committed, and do at
        it, the same on all of them; see `StepParticipant`. `rounding`: returns for a dtype of
        parameters how their gradients are rounded to travel, instead of `wire=`; see
        `GradientRounding`.

        Raises SpecError, ModelError or StateError for arguments that cannot be used, LoopError for
        a second call or a body that changes what the step owns, LossError for what the loss
        function returns, DataError for data that cannot be read, and what user code raises.
        """
        session = self._session
        try:
            session.open(
                StepsArguments(
                    model=model,
                    optimizer=optimizer,
                    loss_fn=loss_fn,
                    scheduler=scheduler,
                    clip_norm=clip_norm,
                    clip_value=clip_value,
                    precision=precision,
                    state=self._with_carried({} if state is None else state),
                    noise_scale_every=noise_scale_every,
                    inner_optimizer=inner_optimizer,
                    inner_clip_norm=inner_clip_norm,
                    participants=tuple(participants),
                    rounding=rounding,
                )
            )
            while (record := session.next_step()) is not None:
                yield Step(record, session)
        except StopIteration as error:  # a generator must not raise it
            failure = session.loop.failed(
                LossError(
                    "the loss function raised StopIteration, or the model or data that it used, "
                    "as next() does at the end of an iterator: give next() a default, or restart "
                    "the iterator"
                )
            )
            raise failure from error
        except Exception as error:  # the user's own code may swallow it
            session.loop.failed(error)
            raise
        finally:
            session.at_loop_end.close()

    def evaluate(
        self, fn: LossFn, data: DataConfig | MapStyleData, *, model: torch.nn.Module | None = None
    ) -> dict[str, float]:
        """Means over all rows of `data`, computed by the whole group, equal on every worker.

        `fn` is called like a loss function, with `model` (default: the trained one) in evaluation
        mode and without gradients. Returns {"eval_loss": …} and one "eval_<name>" for each metric
        that `fn` returns: floats, added up in double precision in the order of the rows, each
        micro-batch by its weight.

        Call it on every worker, in the loop or after it; raises LoopError before it, LossError
        inside a loss function or for what `fn` returns, ModelError for another `model` than a
        module, SpecError or DataError for `data`.
        """
        self._refuse_in_loss("ctx.evaluate")
        from elastic_dp.train.step.evaluation import evaluate

        return evaluate(self._session, fn, self._opened(data), model)

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Records metrics for this step. Call it on every worker: they are recorded once.

        `metrics` maps names to numbers, strings, None, lists and mappings of these; a tensor or an
        array with one element becomes a number, a larger one nested lists of its shape, anything
        else its `str`. Raises LoopError for no mapping, or a name that a record has itself
        ("time", "event", "command", "step"), and LossError inside a loss function.
        """
        session, step = self._session, self._session.position.step
        self._refuse_in_loss("ctx.log")
        if not isinstance(metrics, Mapping):
            raise LoopError(
                f"ctx.log got a {type(metrics).__name__}, must be a mapping of names to values"
            )
        plain = _plain(metrics)
        taken = _OF_A_LINE & plain.keys() if plain.pop("step", step) == step else {"step"}
        if taken:
            raise LoopError(
                f"ctx.log got a metric named {min(taken)!r}, which the record of step {step} "
                "has itself; give it another name"
            )
        session.link.log(*session.progress.logs(), plain)

    def _with_carried(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        if self._carried is None or not isinstance(state, Mapping):
            return state
        if _CARRY in state:
            raise SpecError(
                f"state has the key {_CARRY!r}, which is that of ctx.carry: give the object "
                "another one"
            )
        return {**state, _CARRY: self._carried}

    def _is_in_loss(self) -> bool:
        session = self._session
        return session.loop.opened and session.state.model_guard.is_in_loss

    def _tell_if_in_loss(self, name: str) -> None:
        """Warns about a value that differs between workers, or changes with their number."""
        if self._is_in_loss() and name not in self._told and self._session.is_source:
            self._told.add(name)
            self._session.link.say(
                f"WARNING: the loss function reads {name}, which depends on the number of "
                "workers. If the loss depends on it, so does the result: micro-batches are "
                "already weighted by their rows, whichever worker runs them"
            )

    def _refuse_in_loss(self, name: str) -> None:
        if self._is_in_loss():
            raise LossError(
                f"the loss function called {name}, but it runs once for each micro-batch, and "
                "each worker has its own. To log metrics, return (loss, weight, metrics); call "
                "the rest in the loop's body"
            )

    def _opened(self, data: DataConfig | MapStyleData) -> Evaluation:
        """Returns the batches of a config, opened once, since reading an index is slow.

        A body may make a config each time: an equal one counts as the same, and few are kept.
        """
        from elastic_dp.data import open_evaluation

        for config, batches in self._evaluation_data:
            if config is data or (isinstance(data, DataConfig) and config == data):
                return batches
        if not isinstance(data, DataConfig | MapStyleData):
            raise SpecError(
                f"data is a {type(data).__name__}, must be a DataConfig or a MapStyleData, as in "
                "MapStyleData(loader.dataset, micro_batch_size=8)"
            )
        session = self._session
        opened = open_evaluation(
            data,
            pin=is_gpu(session.device),
            timeout_s=session.spec.failure.storage_timeout_s,
            on_wait=session.link.say,
        )
        self._evaluation_data = [*self._evaluation_data[1 - _EVALUATIONS_KEPT :], (data, opened)]
        return opened

    def checkpoint(self, metrics: Mapping[str, Any] | None = None) -> None:
        """Takes a checkpoint of this step, including this body. Call it on every worker; it returns
        at once.

        `metrics` are logged, as by `ctx.log`, and stored with the checkpoint.
        Raises what `ctx.log` raises.
        """
        self._refuse_in_loss("ctx.checkpoint")
        if metrics is not None:
            self.log(metrics)
        if self._session.checkpoints is not None:
            self._session.checkpoints.request()

    def rewind(self, to_step: int, *, leave_out: tuple[int, int]) -> NoReturn:
        """Lets the run go on from its newest checkpoint of step `to_step` or earlier; 0: from the
        start. From there on it leaves out the rows of steps `leave_out`, the first and the last
        one, and later steps take their places.

        Call it on every worker, in the same step: whether to do so must follow from what is the
        same on all of them, as the loss is. Raises RewindRequested, which ends the train function;
        `fit` then rewinds the run and goes on. Raises SpecError for wrong numbers, and LossError
        inside a loss function.
        """
        self._refuse_in_loss("ctx.rewind")
        grows, step = len(self._session.spec.micro_batches_by_step) > 1, self._session.position.step
        total = self._session.total_steps or None
        check_rewind(to_step, leave_out or (), total=total, grows=grows)
        if to_step >= step:
            raise SpecError(f"to_step is {to_step}, must be less than the present step, {step}")
        raise RewindRequested(step, "ctx.rewind was called", to_step, *leave_out)

    def stop(self, reason: str) -> None:
        """Ends the run after the present step, on every worker. A call on one worker is enough.

        `reason` is the `Result.reason`. Returns at once, also inside a loss function: the loop over
        `steps` ends by itself, as soon as all workers have agreed on its last step.
        """
        self._session.control.stop(reason)


def _plain(value: Any, depth: int = 0) -> Any:
    """Returns JSON values, so that the controller needs neither the user's classes nor a device."""
    if depth > _DEEPEST:
        raise LoopError(f"ctx.log got a value of more than {_DEEPEST} levels: log its numbers")
    if isinstance(value, torch.Tensor | np.generic | np.ndarray):
        size = value.numel() if isinstance(value, torch.Tensor) else value.size
        value = value.item() if size == 1 else value.tolist()
    if isinstance(value, Mapping):
        return {_text(key): _plain(x, depth + 1) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(x, depth + 1) for x in value]
    if isinstance(value, int) and abs(value) > sys.float_info.max:  # who reads it makes a float
        return math.inf if value > 0 else -math.inf
    return value if value is None or isinstance(value, bool | int | float) else _text(value)


def _text(value: Any) -> str:
    """Returns a text that can be written. A file name that is no UTF-8 holds half characters."""
    return str(value).encode("utf-8", "backslashreplace").decode()
