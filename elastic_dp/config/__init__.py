"""The configuration of a job: frozen values that are checked once, before anything starts.

Every check is here, names the field, and says what to do. Nothing below reads the environment or
corrects a value silently. `ScalingConfig.virtual_workers` and `DataConfig` decide the result of a
run; everything else decides only where and how fast it runs.
"""

from elastic_dp.config.checkpoint_config import CheckpointConfig
from elastic_dp.config.data_config import DataConfig, MapStyleData
from elastic_dp.config.failure_config import FailureConfig, Rewind
from elastic_dp.config.job_spec import JobSpec
from elastic_dp.config.scaling_config import ScalingConfig, label_values

__all__ = [
    "CheckpointConfig",
    "DataConfig",
    "FailureConfig",
    "JobSpec",
    "MapStyleData",
    "Rewind",
    "ScalingConfig",
    "label_values",
]
