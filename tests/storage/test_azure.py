"""A data set on Azure's blob storage, as its emulator answers."""

import pyarrow as pa
import pyarrow.parquet as pq

from elastic_dp.config import DataConfig
from elastic_dp.data import open_evaluation
from tests.storage.conftest import azure_place
from tests.storage.servers import azure_options


def test_rows_on_azure_are_read_with_an_account_key(container):
    endpoint, name = container
    place = azure_place(endpoint, name, azure_options(endpoint))
    for number in range(3):
        sink = pa.BufferOutputStream()
        ids = pa.array(range(number * 10, number * 10 + 10))
        pq.write_table(pa.table({"id": ids}), sink, row_group_size=4)
        place.plant(f"part-{number}.parquet", sink.getvalue().to_pybytes())
    config = DataConfig(place.url, micro_batch_size=7, storage_options=place.options)
    data = open_evaluation(config)
    try:
        seen = [i for index in range(data.num_batches) for i in data.batch(index)["id"].tolist()]
    finally:
        data.close()
    assert seen == list(range(30))
