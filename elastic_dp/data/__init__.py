"""From the URL of a data set to the tensors of a micro-batch: `open_data(config,
virtual_workers=V).batch(step, v)`.

The order of rows is computed (`sampling/`): (step, virtual worker) has the same rows in every
process. The driver opens a data set once and ships `dataset.index` to the workers, which list
nothing. Each name is imported at its first use: `open_data` needs torch, which takes a second or
two, and a worker needs no `read_index`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elastic_dp.data.block_source import BlockSource as BlockSource
    from elastic_dp.data.datasets.micro_batch_stream import Evaluation as Evaluation
    from elastic_dp.data.datasets.micro_batch_stream import MicroBatchStream as MicroBatchStream
    from elastic_dp.data.datasets.opening import open_data as open_data
    from elastic_dp.data.datasets.opening import open_evaluation as open_evaluation
    from elastic_dp.data.discovery.index import read_index as read_index
    from elastic_dp.data.discovery.index_difference import difference as difference
    from elastic_dp.data.discovery.shard_index import Index as Index


_MODULES = {
    "BlockSource": "block_source",
    **dict.fromkeys(("Evaluation", "MicroBatchStream"), "datasets.micro_batch_stream"),
    **dict.fromkeys(("open_data", "open_evaluation"), "datasets.opening"),
    "Index": "discovery.shard_index",
    "difference": "discovery.index_difference",
    "read_index": "discovery.index",
}


if not TYPE_CHECKING:  # a type checker would take any name for one of these

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
