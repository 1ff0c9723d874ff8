"""From the URL of a data set to the tensors of a micro-batch: `open_data(config,
virtual_workers=V).batch(step, v)`.

The order of rows is computed (`sampling/`): (step, virtual worker) has the same rows in every
process. The driver opens a data set once and ships `dataset.index` to the workers, which list
nothing. `open_data` needs torch, which takes a second or two to import, so it is imported at the
first use.
"""

from typing import TYPE_CHECKING, Any

from elastic_dp.data.block_source import BlockSource
from elastic_dp.data.discovery.index import Index, read_index
from elastic_dp.data.discovery.index_difference import difference

if TYPE_CHECKING:
    from elastic_dp.data.datasets.micro_batch_stream import Evaluation, MicroBatchStream
    from elastic_dp.data.datasets.opening import open_data, open_evaluation

__all__ = [
    "BlockSource",
    "Evaluation",
    "Index",
    "MicroBatchStream",
    "difference",
    "open_data",
    "open_evaluation",
    "read_index",
]


def __getattr__(name: str) -> Any:
    if name not in ("open_data", "open_evaluation", "Evaluation", "MicroBatchStream"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from elastic_dp.data.datasets import opening

    return getattr(opening, name)
