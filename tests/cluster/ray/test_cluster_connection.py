"""A Ray that takes longer to start than Ray gives it, and one that does not let us in."""

import pytest

from elastic_dp.cluster.ray import cluster_connection
from elastic_dp.errors import ClusterError

SLOW = "The current node timed out during startup. This could happen because ..."


@pytest.fixture
def starts(monkeypatch):
    """What each start of a Ray ends with: an error, or None. Shutdowns are noted."""
    ends, seen = [], []

    def init(**_):
        seen.append("init")
        if error := ends.pop(0):
            raise error

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(cluster_connection.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(cluster_connection.ray, "init", init)
    monkeypatch.setattr(cluster_connection.ray, "shutdown", lambda: seen.append("shutdown"))
    monkeypatch.setattr(cluster_connection.private, "owns_cluster", lambda: False)
    return ends, seen


def test_ray_that_is_slow_to_start_is_started_again_and_said_so(starts, caplog):
    ends, seen = starts
    ends += [Exception(SLOW), None]
    cluster_connection.connect_or_start()
    assert seen == ["init", "shutdown", "init"]
    assert "started again" in caplog.text


def test_ray_that_is_slow_to_start_twice_is_a_cluster_error_with_the_way_out(starts):
    ends, seen = starts
    ends += [Exception(SLOW), Exception(SLOW)]
    with pytest.raises(ClusterError, match=r"ray start --head.*RAY_ADDRESS"):
        cluster_connection.connect_or_start()
    assert seen == ["init", "shutdown", "init", "shutdown"]


def test_start_of_ray_with_another_error_is_not_tried_again(starts):
    ends, seen = starts
    ends += [ValueError("no such option")]
    with pytest.raises(ValueError, match="no such option"):
        cluster_connection.connect_or_start()
    assert seen == ["init", "shutdown"]


def test_cluster_of_ray_address_that_refuses_is_a_cluster_error_that_names_the_token(
    starts, monkeypatch
):
    ends, seen = starts
    ends += [ConnectionError("Failed to connect to Ray cluster")]
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    with pytest.raises(ClusterError, match=r"RAY_AUTH_MODE=token"):
        cluster_connection.connect_or_start()
    assert seen == ["init"]
