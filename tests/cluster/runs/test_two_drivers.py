"""Two drivers with different jobs at one folder: one is refused, whatever the instant."""

import pytest

from elastic_dp import run_record
from elastic_dp.errors import LeaseLost, RunMismatch
from elastic_dp.storage import Store
from tests.cluster.runs.test_rerun import FIRST, fit
from tests.runs import group, spec_of


def test_a_driver_that_looked_before_another_wrote_is_refused(tmp_path, monkeypatch):
    """At the worst instant: it has seen no run.json, and the other one trains to its end before it
    writes."""
    write, first = Store.write, []

    def write_late(store, path, content, **how):
        if path.endswith("run.json") and not first:
            first.append(None)  # the other's own write passes
            first[0] = fit(tmp_path, seed=0)[0]
        write(store, path, content, **how)

    monkeypatch.setattr(Store, "write", write_late)
    with pytest.raises(RunMismatch, match=r"seed is 1, .* started with 0"):
        fit(tmp_path, seed=1, max_steps=6)
    assert fit(tmp_path)[0] == first[0]


def test_the_record_is_compared_again_under_the_lease(tmp_path, monkeypatch):
    """Somebody has deleted the folder since the driver looked, and another run was begun there."""
    read, looks = run_record._read_run, []

    def read_then_replaced(store):
        looks.append(store)
        if len(looks) == 2:  # before it: by the driver
            found = read(store)
            monkeypatch.setattr(run_record, "_read_run", read)
            (tmp_path / "again" / "run.json").unlink()
            other = run_record.RunRecord(2, 4, 7, found.data, True)
            other.check_or_write(store._url, None)
        return read(store)

    fit(tmp_path)
    (tmp_path / "again" / "result.json").unlink()
    monkeypatch.setattr(run_record, "_read_run", read_then_replaced)
    with pytest.raises(RunMismatch, match=r"seed is 0, .* started with 7"):
        fit(tmp_path)


def test_a_run_on_workers_ends_where_its_record_is_another_s(tmp_path):
    def check():
        raise RunMismatch("seed is 1, but the run was started with 0")

    from elastic_dp.testing.process_worker_group import ProcessRun

    spec = spec_of(virtual=2, workers=1, steps=4)
    with ProcessRun(spec, FIRST, url=str(tmp_path / "run"), check=check) as run:
        outcome = run.wait()
    assert outcome.error == "RunMismatch: seed is 1, but the run was started with 0"
    assert outcome.error_facts == ("seed is 1, but the run was started with 0",)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"seed": 1}, "seed is 1, .* made with 0"),
        ({"virtual": 4}, "virtual_workers is 4, .* made with 2"),
        ({"size": 8}, "micro_batch_size is 8, .* made with 4"),
        ({"exact": False}, "exact is False, .* made with True"),
        ({"rows": 96}, r"data \(its fingerprint\) is"),
    ],
)
def test_a_checkpoint_of_another_job_is_refused_though_run_json_is_gone(tmp_path, other, words):
    fit(tmp_path)
    for name in ("run.json", "result.json"):
        (tmp_path / "again" / name).unlink()
    with pytest.raises(RunMismatch, match=words):
        fit(tmp_path, max_steps=6, **other)


def test_workers_refuse_a_checkpoint_of_another_job(tmp_path):
    fit(tmp_path, seed=1)
    outcome, _ = group(
        spec_of(virtual=2, workers=1, steps=6), FIRST, url=str(tmp_path / "again"), fails=True
    )
    assert outcome.error.startswith("RunMismatch: seed is 0, but the newest checkpoint")


def test_a_local_run_whose_lease_is_taken_raises_and_writes_no_result(tmp_path, monkeypatch):
    from elastic_dp.checkpoint.lease import Lease

    def taken(lease):
        raise LeaseLost("the run is held by another now")

    monkeypatch.setattr(Lease, "renew", taken)
    with pytest.raises(LeaseLost, match="held by another"):
        fit(tmp_path)
    assert not (tmp_path / "again" / "result.json").exists()
