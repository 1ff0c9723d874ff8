"""A job for tests on a real Ray, and how to follow its run."""

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

import ray

import elastic_dp as edp
from tests.patience import eventually
from tests.runs import PATIENT, Points
from tests.train.jobs import Average, adamw, classifier, cross_entropy, hold

FOR_EVER = 100_000  # steps: an operator stops it


def train(ctx: Any) -> None:
    model = classifier()
    optimizer = adamw(model)
    average = Average(model)

    @dataclasses.dataclass
    class Best:  # what no worker can import, as a class of the user's own script
        loss: float = 99.0

    class Tracker:
        best = Best()

        def state_dict(self):
            return {"best": self.best.loss}

        def load_state_dict(self, state):
            self.best = Best(state["best"])

    tracker = Tracker()
    state = {"ema": average, "tracker": tracker}
    print("the words of a worker")
    for step in ctx.steps(model, optimizer, cross_entropy, state=state, clip_norm=1.0):
        average.update(model)
        tracker.best = Best(min(step.loss, tracker.best.loss))
        ctx.log({"loss": step.loss, "best": tracker.best.loss, "world": ctx.world_size})
        hold(ctx, step)


def trainer(
    path: Path | str,
    name: str,
    train: Callable[[Any], None] = train,
    *,
    steps: int = 60,
    workers: int = 1,
    standby: int = 0,
    every_steps: int | None = None,
    failure: edp.FailureConfig = PATIENT,
    sharding: Literal["optimizer"] | None = None,
    storage_options: dict[str, Any] | None = None,
    **config: Any,
) -> edp.ElasticTrainer:
    return edp.ElasticTrainer(
        train,
        name=name,
        storage_path=str(path),
        config=config,
        data=edp.MapStyleData(Points(), micro_batch_size=4),
        scaling=edp.ScalingConfig(
            min_workers=1,
            max_workers=workers,
            virtual_workers=8,
            standby=standby,
        ),
        checkpoint=edp.CheckpointConfig(every_steps=every_steps),
        failure=failure,
        sharding=sharding,
        max_steps=steps,
        storage_options=storage_options,
    )


def undisturbed(path: Path, steps: int) -> str:
    """The weights after so many steps in this process."""
    return trainer(path, "calm", steps=steps).fit(local=True).weights_sha256


def wait_for(run: edp.Run, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The run's status, soon after it is so: to ask for it keeps four processes busy."""

    def look() -> dict[str, Any] | None:
        status = run.status()
        if condition(status):
            return status
        assert status["phase"] != "over", status
        return None

    return eventually(look, run.status, every_s=0.05) or {}


def members(status: dict[str, Any]) -> list[str]:
    """Return the members of the present group: they have built their model and wait for nobody."""
    return sorted(w for w, stage in status["workers"].items() if stage == "member")


def is_whole(status: dict[str, Any], size: int) -> bool:
    """Whether a group of that size trains."""
    return (status["phase"], len(members(status)), status["world_size"]) == ("running", size, size)


def pids_of(run: edp.Run, workers: Iterable[str]) -> dict[str, int]:
    """Who is slow to answer is asked again."""
    wanted = set(workers)
    found = eventually(lambda: (all_ := run.pids()).keys() >= wanted and all_, run.status)
    assert found
    return {worker: found[worker] for worker in wanted}


def pid_of_controller(name: str) -> int:
    """Return the process id of the run's controller that is up."""

    def look() -> int:
        found = ray._private.state.actors().values()
        up = (a for a in found if (a["Name"], a["State"]) == (f"{name}/controller", "ALIVE"))
        return next((a["Pid"] for a in up), 0)

    return eventually(look)
