"""Elastic, fault-tolerant data-parallel PyTorch training on Ray. The public names; nothing else is stable."""

from elastic_dp.cluster.record import Result
from elastic_dp.cluster.trainer import ElasticTrainer, Run
from elastic_dp.spec import (
    CheckpointConfig,
    DataConfig,
    FailureConfig,
    MapStyleData,
    ScalingConfig,
)
from elastic_dp.train.context import Step, TrainContext

__all__ = [
    "CheckpointConfig",
    "DataConfig",
    "ElasticTrainer",
    "FailureConfig",
    "MapStyleData",
    "Result",
    "Run",
    "ScalingConfig",
    "Step",
    "TrainContext",
]
