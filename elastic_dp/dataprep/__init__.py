"""What makes and inspects shards: `convert`, `inspect`. Nothing in training imports it."""

from elastic_dp.dataprep.convert import Converted, convert
from elastic_dp.dataprep.inspection.inspect_dataset import Inspection, inspect

__all__ = ["Converted", "Inspection", "convert", "inspect"]
