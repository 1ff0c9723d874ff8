"""Google Cloud Storage: what fake-gcs-server shows, and the one request that it lacks."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from elastic_dp.checkpoint.storage_probe import probe
from elastic_dp.config import DataConfig
from elastic_dp.data import open_evaluation
from elastic_dp.storage import Store
from elastic_dp.storage.error_classes import Kind, fault_of
from tests.storage.conftest import gs_place
from tests.storage.servers import gcs_options, gcsfs_options, recording_server


@pytest.mark.parametrize("given", [gcs_options, gcsfs_options], ids=["obstore", "gcsfs"])
def test_rows_on_google_cloud_storage_are_read(gs_bucket, given):
    endpoint, name = gs_bucket
    place = gs_place(endpoint, name, given(endpoint))
    for number in range(3):
        sink = pa.BufferOutputStream()
        ids = pa.array(range(number * 10, number * 10 + 10))
        pq.write_table(pa.table({"id": ids}), sink, row_group_size=4)
        place.plant(f"part-{number}.parquet", sink.getvalue().to_pybytes())
    config = DataConfig(place.url, micro_batch_size=7, storage_options=given(endpoint))
    data = open_evaluation(config)
    try:
        seen = [i for index in range(data.num_batches) for i in data.batch(index)["id"].tolist()]
    finally:
        data.close()
    assert seen == list(range(30))


def test_storage_probe_finds_gcsfs_fit_for_a_run_s_folder(gs_bucket):
    endpoint, name = gs_bucket
    probe(gs_place(endpoint, name, gcsfs_options(endpoint)).open(), "token")


def test_obstore_creates_on_google_only_where_there_is_no_generation():
    """fake-gcs-server has no XML uploads, so the answers here are those that Google documents."""
    with recording_server([200, 412], {"ETag": '"a"', "x-goog-generation": "1"}) as (url, seen):
        store = Store("gs://bucket/runs", gcs_options(url))
        store.write("runs/seal", b"first", create_only=True)
        with pytest.raises(FileExistsError):
            store.write("runs/seal", b"second", create_only=True)
    assert [(method, path) for method, path, _ in seen] == [("PUT", "/bucket/runs%2Fseal")] * 2
    assert all(headers["x-goog-if-generation-match"] == "0" for _, _, headers in seen)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (503, Kind.TRANSIENT),
        (429, Kind.TRANSIENT),
        (416, Kind.OTHER_VERSION),
        (403, Kind.PERMANENT),
    ],
)
def test_the_status_in_an_error_of_gcsfs_says_whether_it_may_pass(status, kind):
    from gcsfs.retry import HttpError  # which takes a third of a second

    assert fault_of(HttpError({"code": status, "message": "it said"})).kind is kind
