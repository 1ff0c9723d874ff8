"""Makes shards (`convert`) and inspects them (`inspect`). Training imports nothing from here."""

from elastic_dp.dataprep.convert import Converted, convert
from elastic_dp.dataprep.inspection.inspect_dataset import Inspection, inspect

__all__ = ["Converted", "Inspection", "convert", "inspect"]
