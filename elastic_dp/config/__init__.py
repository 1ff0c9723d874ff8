"""The configuration of a job: frozen values that are checked once, before anything starts.

Every check is here, names the field, and says what to do. Nothing below reads the environment or
corrects a value silently. `ScalingConfig.virtual_workers` and `DataConfig` decide the result of a
run; everything else decides only where and how fast it runs.
"""

from elastic_dp.config.checkpoint_config import CheckpointConfig as CheckpointConfig
from elastic_dp.config.data_config import DataConfig as DataConfig
from elastic_dp.config.data_config import MapStyleData as MapStyleData
from elastic_dp.config.failure_config import FailureConfig as FailureConfig
from elastic_dp.config.failure_config import Rewind as Rewind
from elastic_dp.config.job_spec import JobSpec as JobSpec
from elastic_dp.config.scaling_config import ScalingConfig as ScalingConfig
from elastic_dp.config.scaling_config import label_values as label_values
