"""What stays of a run in the GCS, which is a dict here."""

from types import SimpleNamespace

import pytest

from elastic_dp.cluster.ray import controller_actor, private
from elastic_dp.cluster.runs import attach, ray_kv_state
from elastic_dp.cluster.runs.ray_kv_state import RayKvStateStore, forget, store_job
from elastic_dp.errors import ClusterError
from tests.runs import spec_of


@pytest.fixture
def entries(monkeypatch):
    found: dict[bytes, bytes] = {}

    def put(key, value, *, overwrite=True):
        there = key in found
        if overwrite or not there:
            found[key] = value
        return there

    def delete(key, *, is_prefix=False):
        for each in [k for k in found if k == key or (is_prefix and k.startswith(key))]:
            del found[each]

    monkeypatch.setattr(private, "kv_put", put)
    monkeypatch.setattr(private, "kv_get", found.get)
    monkeypatch.setattr(private, "kv_delete", delete)
    monkeypatch.setattr(
        private, "kv_list", lambda prefix: [k for k in found if k.startswith(prefix)]
    )
    return found


def test_claims_that_are_kept_are_few_and_a_frozen_controller_gets_none(entries):
    frozen = RayKvStateStore("run")
    assert frozen.claim(1) and frozen.claim(1), "claiming twice does no harm"
    leads = RayKvStateStore("run")
    assert not leads.claim(1)
    assert all(leads.claim(generation) for generation in range(2, 100))
    assert len([key for key in entries if b"generation/" in key]) <= 16
    assert leads.highest_claimed() == 99
    assert not frozen.claim(2), "its number is free again, and others are further"
    assert not frozen.claim(99) and frozen.claim(100)


def test_run_that_is_over_leaves_its_newest_claim_alone(entries):
    store_job("old", {"secret": "of the run"})
    state_store = RayKvStateStore("old")
    assert state_store.claim(1) and state_store.claim(2)
    forget("old")
    assert [*entries] == [b"elastic_dp/old/generation/2"]


@pytest.mark.parametrize("answers", [True, False])
def test_driver_that_loses_the_race_to_start_a_run_follows_it_and_leaves_no_secret(
    entries, monkeypatch, answers
):
    spec, job = spec_of(), SimpleNamespace(url="folder")
    winner = SimpleNamespace(controller="winner", url="folder", spec=spec, ended=False)
    found = iter([None, winner if answers else None])

    class Taken:
        @staticmethod
        def options(**_):
            def remote(run):
                assert [key for key in entries if run.encode() in key], "the job is stored first"
                raise ValueError("The name is already taken")

            return SimpleNamespace(remote=remote)

    monkeypatch.setattr(controller_actor, "ControllerActor", Taken)
    monkeypatch.setattr(attach.cluster_connection, "connect_or_start", lambda: None)
    monkeypatch.setattr(attach, "find", lambda name: next(found))
    monkeypatch.setattr(ray_kv_state.pickle, "dumps", lambda job: b"secret")
    if answers:
        assert attach.find_or_start(spec, job, {}) == ("winner", False)
    else:
        with pytest.raises(ClusterError, match="another driver has started"):
            attach.find_or_start(spec, job, {})
    assert entries == {}
