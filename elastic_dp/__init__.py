"""Elastic, fault-tolerant data-parallel PyTorch training on Ray. Only the names in `__all__` are
stable.

A name is imported when it is first used, because torch and ray take seconds to import and
`elastic-dp data` needs neither.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elastic_dp.checkpoint.codec import register_state_type
    from elastic_dp.checkpoint.exporting import load_state
    from elastic_dp.cluster.run_handle import Run
    from elastic_dp.cluster.runs.attach import attach
    from elastic_dp.cluster.trainer import ElasticTrainer
    from elastic_dp.config import (
        CheckpointConfig,
        DataConfig,
        FailureConfig,
        MapStyleData,
        Rewind,
        ScalingConfig,
    )
    from elastic_dp.distributed.gradient_rounding import DtypeRounding, GradientRounding
    from elastic_dp.extensions.delayed.weight_prediction import WeightPrediction
    from elastic_dp.extensions.diloco.inner_moments import InnerMoments
    from elastic_dp.extensions.noise_scale import NoiseScale
    from elastic_dp.run_record import Result
    from elastic_dp.train.context import Step, TrainContext
    from elastic_dp.train.master_weights import MasterWeights
    from elastic_dp.train.step.participants import StepParticipant, StopAgreed

__all__ = [
    "CheckpointConfig",
    "DataConfig",
    "DtypeRounding",
    "ElasticTrainer",
    "FailureConfig",
    "GradientRounding",
    "InnerMoments",
    "MapStyleData",
    "MasterWeights",
    "NoiseScale",
    "Result",
    "Rewind",
    "Run",
    "ScalingConfig",
    "Step",
    "StepParticipant",
    "StopAgreed",
    "TrainContext",
    "WeightPrediction",
    "attach",
    "load_state",
    "register_state_type",
]

_HOMES = {
    "DtypeRounding": "elastic_dp.distributed.gradient_rounding",
    "ElasticTrainer": "elastic_dp.cluster.trainer",
    "GradientRounding": "elastic_dp.distributed.gradient_rounding",
    "InnerMoments": "elastic_dp.extensions.diloco.inner_moments",
    "MasterWeights": "elastic_dp.train.master_weights",
    "NoiseScale": "elastic_dp.extensions.noise_scale",
    "Result": "elastic_dp.run_record",
    "Run": "elastic_dp.cluster.run_handle",
    "Step": "elastic_dp.train.context",
    "StepParticipant": "elastic_dp.train.step.participants",
    "StopAgreed": "elastic_dp.train.step.participants",
    "TrainContext": "elastic_dp.train.context",
    "WeightPrediction": "elastic_dp.extensions.delayed.weight_prediction",
    "attach": "elastic_dp.cluster.runs.attach",
    "load_state": "elastic_dp.checkpoint.exporting",
    "register_state_type": "elastic_dp.checkpoint.codec",
}


if not TYPE_CHECKING:  # a type checker would take any name for one of these

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            removed = importlib.import_module("elastic_dp.config.removed_names").REMOVED_NAMES
            if name in removed:  # `from elastic_dp import ...` hides the words of an AttributeError
                raise ImportError(removed[name])
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(_HOMES.get(name, "elastic_dp.config")), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return __all__
