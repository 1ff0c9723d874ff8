"""Makes shards (`write_shards`, `convert`) and inspects them (`inspect`). Training imports nothing
from here.

Kept beside `pyarrow.dataset`, `datasets` and DuckDB's COPY, because none of these writes row groups
of a bounded number of bytes, makes a data set on an object store visible only when it is complete,
and refuses what training would refuse. Inspection says what this package's training will read
slowly or refuse, which no other tool knows.
"""

from elastic_dp.dataprep.convert import Converted, convert
from elastic_dp.dataprep.inspection import Inspection, inspect
from elastic_dp.dataprep.write_shards import WrittenShards, write_shards

__all__ = ["Converted", "Inspection", "WrittenShards", "convert", "inspect", "write_shards"]
