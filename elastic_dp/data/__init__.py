"""From a data set's URL to the tensors of one micro-batch: `open_data(config, virtual_workers=V).batch(step, v)`.

Order is arithmetic (`sampling/`): whoever asks for (step, virtual worker) gets the same rows. The driver opens
once and ships `dataset.manifest` to the workers, which then list nothing.
"""

from elastic_dp.data.interface import Dataset, EvaluationData
from elastic_dp.data.manifest import Manifest, Shard, read_manifest
from elastic_dp.data.opening import open_data, open_evaluation

__all__ = [
    "Dataset",
    "EvaluationData",
    "Manifest",
    "Shard",
    "open_data",
    "open_evaluation",
    "read_manifest",
]
