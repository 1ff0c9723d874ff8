"""Evaluation by the whole group: each member evaluates a share of the batches, and all get the
result.

The result of a batch depends only on its rows and the weights, so any member may compute it.
Members exchange the results that they have, split what is missing, and exchange again. If a member
dies before an exchange, the others compute its results again. The sum runs over the batches in
order, in double precision on the host.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from elastic_dp.device.global_generators import generators_kept, seed_everything
from elastic_dp.distributed.local_shards import reshard
from elastic_dp.errors import GroupError, LoopError, ModelError
from elastic_dp.sampling.seeds import batch_seed, seed_for
from elastic_dp.train.state.module_buffers import changed_by_body
from elastic_dp.train.step.loss_result import mean_metrics, parse_loss
from elastic_dp.train.step.micro_batch import LossFn, MicroBatchResult, to_device
from elastic_dp.train.steps_arguments import check_loss_fn
from elastic_dp.train.worker_session import WorkerSession

if TYPE_CHECKING:
    from elastic_dp.data import Evaluation

# batch -> (loss, weight, metrics, rows that were skipped because they cannot be decoded)
Results = dict[int, tuple[float, float, dict[str, float], int]]

_EVALUATION = 1 << 32  # keeps the seeds of evaluation batches apart from those of virtual workers


def evaluate(
    session: WorkerSession, fn: LossFn, data: Evaluation, model: torch.nn.Module | None
) -> dict[str, float]:
    """Returns means over all rows of `data`, as {"eval_loss": …, "eval_<metric>": …}."""
    if session.membership is None or not session.loop.opened:
        raise LoopError(
            "ctx.evaluate needs the group: call it in the loop over ctx.steps, or after it"
        )
    check_loss_fn("fn", fn)
    if not isinstance(model, torch.nn.Module | None):
        raise ModelError(
            f"ctx.evaluate got a {type(model).__name__} as model, must be a torch.nn.Module"
        )
    buffers = session.transaction.leaves.buffers
    buffers.attributes.evaluation_begins()
    if (written := buffers.written_outside()) is not None:
        if not session.loop.exhausted:
            raise LoopError(changed_by_body(written))
        buffers.reload()  # after the loop: what the code has written stays
    progress = session.progress
    index = progress.evaluation_begins()
    known: Results = {}
    while index >= len(progress.evaluations):
        session.ensure_generation()
        if index < len(progress.evaluations):
            break  # the others had finished it; the state transfer brought it
        reason = session.control.may_attempt(progress.position.step)
        if reason is not None:
            session.leave(reason)
            continue
        try:
            _complete(session, fn, data, model, known)
            data.check_left_out(sum(left_out for *_, left_out in known.values()))
            session.control.commit()
        except GroupError as error:
            session.leave(error)
            continue
        progress.evaluation_committed(_summary(known))
        session.report("body")
    return dict(progress.evaluations[index])


def _complete(
    session: WorkerSession,
    fn: LossFn,
    data: Evaluation,
    model: torch.nn.Module | None,
    known: Results,
) -> None:
    """Computes until every member has the results of all batches."""
    session.report("evaluate")
    session.report_evaluations(ended=False)
    of_data = [data.fingerprint, data.num_batches]
    # The processes of a worker may have heard of different results before a member was lost.
    for payload in reversed(session.control.exchange(_packed(known, of_data))):
        known.update(_unpacked(payload, of_data))
    group = session.groups.auxiliary()
    while True:
        session.pass_point("evaluate_exchange")
        for payload in group.gather_bytes(_packed(known, of_data)):
            known.update(_unpacked(payload, of_data))
        missing = [i for i in range(data.num_batches) if i not in known]
        if not missing:
            return
        share = math.ceil(len(missing) / group.world_size)
        mine = missing[group.rank * share : (group.rank + 1) * share]
        data.read_ahead(mine)
        with _quietly(session, model or session.state.model) as evaluated:
            for i in mine:
                session.control.may_continue()
                session.pass_point("evaluate")
                known[i] = _one(session, fn, data, evaluated, i)


def _packed(results: Results, of_data: Sequence[Any]) -> bytes:
    return json.dumps([of_data, list(results.items())]).encode()


def _unpacked(payload: bytes, of_data: Sequence[Any]) -> Results:
    said, results = json.loads(payload)
    if said != of_data:
        raise LoopError(
            "ctx.evaluate got other data on one worker than on another: all evaluate together, so "
            "pass the same data on every worker"
        )
    return {int(i): tuple(result) for i, result in results}


def _one(
    session: WorkerSession, fn: LossFn, data: Evaluation, model: torch.nn.Module, i: int
) -> tuple[float, float, dict[str, float], int]:
    position = (session.spec.data.seed, session.position.step, _EVALUATION + i)
    seed_everything(batch_seed(*position))
    batch = to_device(data.batch(i), session.device)
    seed_everything(seed_for(*position))  # as in a step
    if batch is None:  # all its rows lie in bad row groups
        return 0.0, 0.0, {}, data.rows(i)
    left_out = data.masked(i)
    with session.transaction.leaves.leaf.autocast():
        loss, weight, metrics = parse_loss(fn(model, batch), data.rows(i) - left_out)
    return float(loss), weight, metrics, left_out


@contextlib.contextmanager
def _quietly(session: WorkerSession, model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """A context in evaluation mode, which restores modes, buffers and random numbers."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad(), generators_kept(session.device):
            yield model
    finally:
        for module, training in modes:
            module.training = training
        reshard(model)
        session.transaction.leaves.buffers.restore()


def _summary(results: Results) -> dict[str, float]:
    of_rows = [
        MicroBatchResult(loss, weight, {"loss": loss, **metrics})
        for _, (loss, weight, metrics, _) in sorted(results.items())
        if weight
    ]
    return {f"eval_{name}": value for name, value in mean_metrics(of_rows).items()}
