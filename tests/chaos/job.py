"""The job of the chaos suite, as a driver: `python -m tests.chaos.job FOLDER NAME STEPS
[option=json …]`.

Small, so that steps are short, and with everything that tells a lost or a doubled step from a whole
one: dropout, an average in the body that enters the loss, and the ids of the rows, logged.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import elastic_dp as edp
from tests.runs import Points
from tests.train.jobs import Average, adamw, classifier, cross_entropy, hold


def train(ctx: Any) -> None:
    model = classifier()
    optimizer = adamw(model)
    average = Average(model)

    def loss_fn(m: Any, batch: Any) -> Any:
        loss = cross_entropy(m, batch)
        return loss, len(batch["i"]), {"ids": batch["i"].double().mean()}

    for step in ctx.steps(model, optimizer, loss_fn, state={"average": average}, clip_norm=1.0):
        average.update(model)
        ctx.log({"loss": step.loss, "ids": step.metrics["ids"], "world": ctx.world_size})
        hold(ctx, step)


def trainer(folder: str, name: str, steps: int, **options: Any) -> edp.ElasticTrainer:
    body_s = options.pop("body_s", 0.03)
    every_steps = options.pop("every_steps", None)
    hold = {int(step): size for step, size in options.pop("hold", {}).items()}
    max_time_s = options.pop("max_time_s", None)
    heartbeat_timeout_s = options.pop("heartbeat_timeout_s", 2.0)
    scaling = {"min_workers": 1, "max_workers": 3, "virtual_workers": 4} | options
    return edp.ElasticTrainer(
        train,
        name=name,
        storage_path=folder,
        config={"body_s": body_s, "hold": hold},
        data=edp.MapStyleData(Points(), micro_batch_size=4),
        scaling=edp.ScalingConfig(resources_per_worker={"place": 1}, **scaling),
        checkpoint=edp.CheckpointConfig(every_steps=every_steps),
        failure=edp.FailureConfig(heartbeat_timeout_s=heartbeat_timeout_s),
        max_steps=steps,
        max_time_s=max_time_s,
    )


def main() -> None:
    folder, name, steps, *words = sys.argv[1:]
    options = {key: json.loads(value) for key, _, value in (w.partition("=") for w in words)}
    print(trainer(folder, name, int(steps), **options).start().result())


if __name__ == "__main__":
    main()
