"""Google Cloud Storage: what fake-gcs-server shows, and the one request that it lacks."""

import pytest

from elastic_dp.storage import Store
from tests.storage.servers import gcs_options, recording_server


def test_obstore_creates_on_google_only_where_there_is_no_generation():
    """fake-gcs-server has no XML uploads, so the answers here are those that Google documents."""
    with recording_server([200, 412], {"ETag": '"a"', "x-goog-generation": "1"}) as (url, seen):
        store = Store("gs://bucket/runs", gcs_options(url))
        store.write("runs/seal", b"first", create_only=True)
        with pytest.raises(FileExistsError):
            store.write("runs/seal", b"second", create_only=True)
    assert [(method, path) for method, path, _ in seen] == [("PUT", "/bucket/runs%2Fseal")] * 2
    assert all(headers["x-goog-if-generation-match"] == "0" for _, _, headers in seen)
