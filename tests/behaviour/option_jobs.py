"""A small job for each option of training and for pairs of options, with the digest of all that it
computes: final weights, and loss, learning rate, norm and metrics of each step."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import elastic_dp as edp
from elastic_dp.config import JobSpec, MapStyleData
from elastic_dp.extensions.noise_scale import SQUARE, TRACE
from tests.runs import Points, local, spec_of
from tests.train.jobs import classifier, cross_entropy, hold

STEPS = 12
Loop = Callable[[Any], None]


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)


def _inner(model: nn.Module, step: int) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def _normalized() -> nn.Module:
    return nn.Sequential(
        nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4)
    )


def _of(kind: Any, **options: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: kind(model.parameters(), **options)


@dataclass(frozen=True)
class Job:
    """`spec`: fields of the job. `steps`: arguments of `ctx.steps`, each a value or a function that
    makes one of the optimizer."""

    spec: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = _adamw
    model: Callable[[], nn.Module] = classifier
    steps: Mapping[str, Any] = field(default_factory=dict)
    virtual: int | dict[int, int] = 6
    rows: int = 192
    tail: str = "drop"
    loss: Callable[[Any, Any], Any] = cross_entropy

    def train(self, ctx: Any) -> None:
        model = self.model()
        optimizer = self.optimizer(model)
        options = {k: v(optimizer) if k == "scheduler" else v for k, v in self.steps.items()}
        for step in ctx.steps(model, optimizer, self.loss, **options):
            metrics = dict(step.metrics)
            noise = tuple(metrics.pop(name) for name in (SQUARE, TRACE) if name in metrics) or None
            values = (step.loss, step.weight, step.lr, step.grad_norm, noise, metrics)
            ctx.log({"values": repr(values)})
            if step.number % 5 == 0:
                ctx.log(ctx.evaluate(self.loss, ctx.config["eval"]))
            hold(ctx, step)

    def made(self, workers: int, **config: Any) -> JobSpec:
        spec = spec_of(
            steps=STEPS,
            workers=workers,
            virtual=self.virtual,
            rows=self.rows,
            tail=self.tail,
            exact=self.spec.get("exact", True),
            config={"eval": MapStyleData(Points(30), micro_batch_size=8), **config},
        )
        return dataclasses.replace(spec, **self.spec)


def _weighted(model: Any, batch: Any) -> Any:
    weight = int(batch["i"].sum()) % 4
    return cross_entropy(model, batch), weight, {"seen": float(batch["x"].sum())}


def _to(dtype: torch.dtype) -> Callable[[], nn.Module]:
    return lambda: classifier().to(dtype)


def _in_bf16(model: Any, batch: Any) -> torch.Tensor:
    return cross_entropy(lambda x: model(x.bfloat16()).float(), batch)


def _cosine(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)


def _moments(second: Any) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        model = classifier()
        model.moments = edp.InnerMoments(model, second_moments=second)
        return model

    return made


def _outer(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.moments.outer_groups(), lr=1.0)


def _go_on(model: Any, step: int) -> torch.optim.Optimizer:
    adam = torch.optim.Adam(model.moments.weights, lr=1e-2, betas=(0.9, 0.95))
    return model.moments.go_on(adam, step=(step - 1) * 2)  # type: ignore[no-any-return]


SHARDED = {"sharding": "optimizer"}
DELAYED = {"staleness": 1}
INNER = {"inner_steps": 2}

JOBS: dict[str, Job] = {
    "adamw": Job(),
    "sgd": Job(optimizer=_sgd),
    "adagrad": Job(optimizer=_of(torch.optim.Adagrad, lr=0.05)),
    "adafactor": Job(optimizer=_of(torch.optim.Adafactor, lr=0.05)),
    "scheduler": Job(steps={"scheduler": _cosine}),
    "clip_norm": Job(steps={"clip_norm": 0.3}),
    "batch_norm": Job(model=_normalized, steps={"clip_norm": 1.0}),
    "bf16": Job(steps={"precision": "bf16"}),
    "bf16_clip": Job(steps={"precision": "bf16", "clip_norm": 0.3}),
    "fp16": Job(steps={"precision": "fp16"}),
    "fp16_clip_scheduler": Job(steps={"precision": "fp16", "clip_norm": 0.3, "scheduler": _cosine}),
    "weights_and_metrics": Job(loss=_weighted),
    "short_tail": Job(tail="short", rows=175),
    "fast": Job(spec={"exact": False}),
    "fast_clip": Job(spec={"exact": False}, steps={"clip_norm": 0.3}, model=_normalized),
    "growing": Job(virtual={0: 2, 4: 4, 8: 6}),
    "growing_clip_bf16": Job(virtual={0: 2, 6: 6}, steps={"clip_norm": 0.3, "precision": "bf16"}),
    "noise_scale": Job(steps={"noise_scale_every": 2}),
    "noise_scale_clip": Job(steps={"noise_scale_every": 1, "clip_norm": 0.3}),
    "bf16_parameters": Job(model=_to(torch.bfloat16), loss=_in_bf16),
    "masters": Job(
        model=_to(torch.bfloat16),
        loss=_in_bf16,
        optimizer=lambda m: edp.MasterWeights(m.parameters(), torch.optim.AdamW, lr=1e-2),
        steps={"clip_norm": 0.3},
    ),
    "wire_bf16": Job(spec={"wire": "bf16"}),
    "wire_int8": Job(spec={"wire": "int8"}),
    "wire_bf16_clip_fp16": Job(
        spec={"wire": "bf16"}, steps={"clip_norm": 0.3, "precision": "fp16"}
    ),
    "wire_int8_batch_norm": Job(spec={"wire": "int8"}, model=_normalized),
    "delayed": Job(spec=DELAYED),
    "delayed_later": Job(spec={"staleness": {0: 0, 5: 1}}, steps={"clip_norm": 0.3}),
    "delayed_wire": Job(spec={**DELAYED, "wire": "bf16"}),
    "delayed_scheduler": Job(spec=DELAYED, steps={"scheduler": _cosine}, model=_normalized),
    "delayed_predicted": Job(
        spec={"staleness": {0: 0, 5: 1}},
        optimizer=lambda m: edp.WeightPrediction(m.parameters(), torch.optim.AdamW, lr=1e-2),
    ),
    "inner": Job(spec=INNER, optimizer=_sgd, steps={"inner_optimizer": _inner}, virtual=3),
    "inner_clip_wire": Job(
        spec={**INNER, "wire": "bf16"},
        optimizer=_sgd,
        steps={"inner_optimizer": _inner, "inner_clip_norm": 0.5, "clip_norm": 1.0},
        virtual=3,
    ),
    "inner_later": Job(
        spec={"inner_steps": {0: 1, 6: 3}},
        optimizer=_sgd,
        steps={"inner_optimizer": _inner},
        virtual=2,
    ),
    "inner_moments": Job(
        spec=INNER,
        model=_moments("factored"),
        optimizer=_outer,
        steps={"inner_optimizer": _go_on},
        virtual=3,
    ),
    "inner_moments_whole": Job(
        spec={**INNER, "wire": "bf16"},
        model=_moments("whole"),
        optimizer=_outer,
        steps={"inner_optimizer": _go_on},
        virtual=3,
    ),
    "sharded": Job(spec=SHARDED),
    "sharded_sgd_clip": Job(spec=SHARDED, optimizer=_sgd, steps={"clip_norm": 0.3}),
    "sharded_adafactor": Job(spec=SHARDED, optimizer=_of(torch.optim.Adafactor, lr=0.05)),
    "sharded_wire": Job(spec={**SHARDED, "wire": "bf16"}, steps={"clip_norm": 0.3}),
    "sharded_bf16": Job(spec=SHARDED, steps={"precision": "bf16", "clip_norm": 0.3}),
    "sharded_masters": Job(
        spec=SHARDED,
        model=_to(torch.bfloat16),
        loss=_in_bf16,
        optimizer=lambda m: edp.MasterWeights(m.parameters(), torch.optim.AdamW, lr=1e-2),
    ),
    "sharded_growing": Job(spec=SHARDED, virtual={0: 2, 6: 6}, model=_normalized),
    "sharded_scheduler": Job(spec=SHARDED, optimizer=_sgd, steps={"scheduler": _cosine}),
}


def of_one_process(name: str) -> dict[str, str]:
    """Train the job in this process. Returns SHA-256 sums: of the final weights, and of what each
    step says of itself."""
    run = local(JOBS[name].made(1), JOBS[name].train)
    said = json.dumps(run.logged, sort_keys=True).encode()
    return {"weights": run.digest, "said": hashlib.sha256(said).hexdigest()}
