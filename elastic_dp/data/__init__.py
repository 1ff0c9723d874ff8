"""From a data set's URL to the tensors of one micro-batch: `open_data(config, virtual_workers=V).batch(step, v)`.

Order is arithmetic (`sampling/`): whoever asks for (step, virtual worker) gets the same rows. The driver opens
once and ships `dataset.index` to the workers, which then list nothing. Opening needs torch, which takes a second
or two to import, so that waits for the first use.
"""

from typing import TYPE_CHECKING, Any

from elastic_dp.data.convert import Converted, convert
from elastic_dp.data.difference import difference
from elastic_dp.data.index import Index, read_index
from elastic_dp.data.inspection import Inspection, inspect
from elastic_dp.data.interface import Dataset, EvaluationData

if TYPE_CHECKING:
    from elastic_dp.data.opening import open_data, open_evaluation

__all__ = [
    "Converted",
    "Dataset",
    "EvaluationData",
    "Index",
    "Inspection",
    "convert",
    "difference",
    "inspect",
    "open_data",
    "open_evaluation",
    "read_index",
]


def __getattr__(name: str) -> Any:
    if name not in ("open_data", "open_evaluation"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from elastic_dp.data import opening

    return getattr(opening, name)
