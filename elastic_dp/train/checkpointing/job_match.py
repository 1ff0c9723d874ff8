"""Compares a checkpoint with the job that continues from it: what must match, and what may differ.

- Tensors that do not fit, another optimizer, or another `state=` raise RunMismatch, which names the
  first difference.
- Changed hyper-parameters (such as a learning rate) give a warning, and the values of the
  checkpoint are used, as after `load_state_dict` of a PyTorch optimizer, since a scheduler or the
  loop body may have changed them. The comparison uses the values that the code sets before the
  first step, so a change that the run itself made is not a difference.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from numbers import Real
from typing import Any

import torch

from elastic_dp.checkpoint.commit_record import CommitMetadata
from elastic_dp.config import JobSpec
from elastic_dp.config.schedules import stored
from elastic_dp.errors import RunMismatch
from elastic_dp.torch_settings import DTYPE
from elastic_dp.train.state.optimizer_state import inner_schedulers
from elastic_dp.train.state.train_state import TrainState, layout_of
from elastic_dp.wording import counted

GROWTH = "growth"  # `ScalingConfig.growth`, beside `job_identity` in a checkpoint
_FOLLOWS = ("params", "initial_lr", "base_lrs")  # derived from values that are compared


def hyperparameters_of(
    state: TrainState, total_steps: int | None, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the arguments of the optimizer and the scheduler, and the `options` of `ctx.steps`,
    as texts, and what of the model is switched off. Call it before the first step. `total_steps` is
    the total that the code read: the code may have derived any argument from it, and an argument
    such as a lambda has no text."""
    groups = state.optimizer.param_groups
    values = {
        f"the optimizer's {key}" + (f" (group {number})" if len(groups) > 1 else ""): value
        for number, group in enumerate(groups)
        for key, value in group.items()
        if key not in _FOLLOWS
    }
    if state.scheduler is not None:
        values |= _of_scheduler("the scheduler", state.scheduler.state_dict())
    return {
        "optimizer": type(state.optimizer).__name__,
        "scheduler": _class_of(state.scheduler),
        "values": {name: _text(value) for name, value in values.items()},
        "options": {key: _text(value) for key, value in options.items()},
        "total_steps": total_steps,
        "off": {
            "requires_grad": [n for n, p in state.parameters.items() if not p.requires_grad],
            "training": [n for n, module in state.model.named_modules() if not module.training],
        },
        "modules": len([*state.model.modules()]),
    }


def _of_scheduler(name: str, values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if key == "_schedulers":
            for number, each in enumerate(value):
                yield from _of_scheduler(f"{name}'s scheduler {number}", each)
        elif key == "_milestones" or not (key in _FOLLOWS or key.startswith("_")):
            yield f"{name}'s {key}", value


def _class_of(scheduler: Any) -> str | None:
    """Returns the name of its class and of those that it is made of."""
    if scheduler is None:
        return None
    inner = ", ".join(str(_class_of(one)) for one in inner_schedulers(scheduler))
    return type(scheduler).__name__ + (f"({inner})" if inner else "")


def changes_since(then: Mapping[str, Any], now: Mapping[str, Any], step: int) -> list[str]:
    """Returns a text for what has changed since the checkpoint of `step` was made. Both are as
    `hyperparameters_of` returns them."""
    before, after = then.get("values", now["values"]), now["values"]  # old ones lack them
    texts = [
        f"{name} is {new} in the code now, was {old}"
        for name in dict.fromkeys([*before, *after])
        if "" not in (old := before.get(name, ""), new := after.get(name)) and old != new
    ]
    same_modules = then.get("modules", now["modules"]) == now["modules"]
    for what, off in then.get("off", {}).items():
        changed = sorted({*off} ^ {*now["off"][what]})
        if changed and (same_modules or what != "training"):  # see `set_modes`
            name = ".".join(filter(None, ("model", changed[0], what)))
            more = f" (and {len(changed) - 1} more)" if len(changed) > 1 else ""
            was = changed[0] not in off
            texts.append(f"{name}{more} is {not was} in the code now, was {was}")
    changes = []
    if texts:
        changes.append(
            f"{'; '.join(texts)}. The values of the checkpoint of step {step} count, as after "
            "load_state_dict; to change them in this run, set them in the loop's body"
        )
    options = then.get("options", {})
    changes += [
        f"{key}={new} of ctx.steps counts from step {step + 1} on; it was {options[key]} before"
        for key, new in now["options"].items()
        if options.get(key, new) != new
    ]
    old, new = then["total_steps"], now["total_steps"]
    if old is not None and new is not None and old != new:
        changes.append(
            f"ctx.total_steps is {new} now and was {old} up to step {step}: a schedule that "
            f"depends on it was made for {counted(old, 'step')} up to there, so its learning rates "
            f"are not those of one run of {counted(new, 'step')}"
        )
    return changes


def job_identity(spec: JobSpec) -> dict[str, Any]:
    """Returns what determines a run's result besides its data. These values must not change while
    the run keeps its name."""
    return {
        "virtual_workers": spec.scaling.num_virtual_workers,
        "micro_batch_size": spec.data.micro_batch_size,
        "seed": spec.data.seed,
        "exact": spec.exact,
        "wire": spec.wire,
        "staleness": stored(spec.staleness),
        "inner_steps": stored(spec.inner_steps),
        "processes_per_worker": spec.scaling.processes_per_worker,
        DTYPE: spec.torch_settings.get(DTYPE, "float32"),
    }


def check_growth(then: Mapping[str, int], now: Mapping[str, int], step: int) -> None:
    """Raises RunMismatch if the batch of any of the first `step` steps has changed. How it grows
    after them may change. The arguments are as `ScalingConfig.growth` has them."""
    before, after = ({int(s): n for s, n in each.items() if int(s) < step} for each in (then, now))
    if before != after:
        first = min(s for s, _ in before.items() ^ after.items())
        was, is_now = before.get(first, "unchanged"), after.get(first, "unchanged")
        raise RunMismatch(
            f"ScalingConfig.virtual_workers[{first}] is {is_now} now, but the run has made step "
            f"{step}, and was {was} after step {first}: only the numbers of later steps may "
            "change. Use a new name= for a new run, or the old number to continue this one"
        )


def check_job(metadata: CommitMetadata, job: Mapping[str, Any], data: str, step: int) -> None:
    """Raises RunMismatch if another job wrote the checkpoint of `step`."""
    then: dict[str, Any] = {**metadata.naming["job"], "data": metadata.data}
    check_growth(then[GROWTH], job[GROWTH], step)
    for name, mine in {**job, "data": data}.items():
        if name != GROWTH and then.get(name, mine) != mine:  # an option may be newer
            what = "data (its fingerprint)" if name == "data" else name
            raise RunMismatch(
                f"{what} is {mine!r}, but the newest checkpoint of the run was made with "
                f"{then[name]!r}. Use a new name= for a new run, or the old value to go on with "
                "this one"
            )


def check_fits(tree: Mapping[str, Any], naming: Mapping[str, Any], state: TrainState) -> None:
    """Raises RunMismatch if the state in a checkpoint does not fit this job."""
    for what, theirs, mine in _compared(tree, naming, state):
        if theirs != mine:
            raise RunMismatch(
                f"{what}: {mine} here, {theirs} in the newest checkpoint of the run. Use a new "
                "name= for a new run (elastic_dp.load_state gives it these weights), or the old "
                "code to continue this one"
            )


def _compared(
    tree: Mapping[str, Any], naming: Mapping[str, Any], state: TrainState
) -> Iterator[tuple[str, Any, Any]]:
    step, held, called = tree["step"], tree["step"]["held"], naming["parameters"]
    mine = state.layout()
    theirs = layout_of(
        dict(zip(called, step["parameters"], strict=True)),
        step["buffers"],
        step["extra_state"],
        naming["made"]["optimizer"],
        naming["groups"],
        tree["body"]["user"],
    )
    for what in [*mine, *theirs]:
        yield what, theirs.get(what, "absent"), mine.get(what, "absent")
    yield "the order of the parameters", [*theirs], [*mine]
    optimizers = len(state.optimizers.all)
    yield "the number of optimizers in the optimizer", len(held["optimizers"]), optimizers
    scheduler = _class_of(state.scheduler)
    before = None if held["scheduler"] is None else naming["made"].get("scheduler", scheduler or "")
    yield "the scheduler", before, scheduler
    yield 'precision="fp16"', step["loss_scale"] is not None, state.loss_scale is not None
    yield "staleness", int("previous" in step), int(state.previous is not None)
    yield from _kinds(step, state)


def _kinds(step: Mapping[str, Any], state: TrainState) -> Iterator[tuple[str, Any, Any]]:
    """Yields the kinds of what the optimizer's groups hold, and of an optimizer's state."""
    names = {p: name for name, p in state.parameters.items()}
    groups, held = state.optimizer.param_groups, step["held"]["optimizers"][0]["groups"]
    for number, (group, given) in enumerate(zip(groups, held, strict=True)):
        for key, value in given["values"].items():
            if value is not None and group.get(key) is not None:
                what = f"optimizer.param_groups[{number}][{key!r}]"
                yield what, _kind(value), _kind(group[key])
    if type(state.optimizer).__module__.startswith("torch.optim."):
        optimized = [p for group in groups for p in group["params"]]
        # A sharded optimizer reads its state elsewhere.
        for p, entry in zip(optimized, step["optimizer"], strict=False):
            for key, value in entry.items():
                if value is not None:
                    what = f"optimizer.state[{names[p]}][{key!r}]"
                    yield what, type(value).__name__, torch.Tensor.__name__


def _kind(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "a list"
    return "a number" if isinstance(value, Real | torch.Tensor) else type(value).__name__


def _text(value: Any) -> str:
    """Returns a text that is equal in every process, or an empty one if the value has none."""
    if isinstance(value, torch.Tensor):
        return repr(value.tolist())
    if isinstance(value, list | tuple):
        texts = [_text(x) for x in value]
        return f"[{', '.join(texts)}]" if all(texts) else ""
    if isinstance(value, Mapping):  # milestones
        return _text([*value.items()])
    plain = value is None or isinstance(value, bool | int | float | str)
    return repr(value) if plain else ""
