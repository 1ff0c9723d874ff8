"""An iterable that no worker could receive, on Ray: the driver writes its rows, workers read
them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.ray import clusters
from tests.train.test_iterable_data import ROWS, data_of, events_of, row, trainer


@pytest.mark.slow
def test_an_iterable_that_cannot_be_pickled_has_the_bits_of_a_local_run(tmp_path):
    lock = threading.Lock()

    def rows() -> Iterator[dict[str, Any]]:
        with lock:
            yield from map(row, range(ROWS))

    data = data_of(rows, transform=lambda batch, rng: {"id": batch["id"]})
    calm = trainer(tmp_path / "local", data, max_steps=6).fit(local=True)
    with clusters.nodes(2):
        result = trainer(tmp_path / "ray", data, max_steps=6).fit()
    assert result.weights_sha256 == calm.weights_sha256
    assert "wrote 96 rows (" in events_of(tmp_path / "ray/r")
