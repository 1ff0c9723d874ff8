"""Google Cloud Storage: what fake-gcs-server shows, and the one request that it lacks."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from elastic_dp.config import DataConfig
from elastic_dp.data import open_evaluation
from elastic_dp.storage import Store
from tests.storage.conftest import gs_place
from tests.storage.servers import gcs_options, recording_server


def test_rows_on_google_cloud_storage_are_read(gs_bucket):
    endpoint, name = gs_bucket
    place = gs_place(endpoint, name, gcs_options(endpoint))
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


def test_obstore_creates_on_google_only_where_there_is_no_generation():
    """fake-gcs-server has no XML uploads, so the answers here are those that Google documents."""
    with recording_server([200, 412], {"ETag": '"a"', "x-goog-generation": "1"}) as (url, seen):
        store = Store("gs://bucket/runs", gcs_options(url))
        store.write("runs/seal", b"first", create_only=True)
        with pytest.raises(FileExistsError):
            store.write("runs/seal", b"second", create_only=True)
    assert [(method, path) for method, path, _ in seen] == [("PUT", "/bucket/runs%2Fseal")] * 2
    assert all(headers["x-goog-if-generation-match"] == "0" for _, _, headers in seen)
