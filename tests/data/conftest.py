"""What a test of this folder opens is closed behind it, also where it fails."""

import pytest

from elastic_dp.data.datasets.micro_batch_stream import MicroBatchStream


@pytest.fixture(autouse=True)
def _closed(monkeypatch):
    opened, init = [], MicroBatchStream.__init__

    def noted(stream, *args, **options):
        init(stream, *args, **options)
        opened.append(stream)

    monkeypatch.setattr(MicroBatchStream, "__init__", noted)
    yield
    for stream in opened:
        stream.close()
