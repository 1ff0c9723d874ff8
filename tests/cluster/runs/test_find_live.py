"""Finds a run among several Rays of one user on one machine."""

import json
import os
import types

import pytest

from elastic_dp.cli.run_options import find_live_run, find_run, name_and_path
from elastic_dp.cluster.runs import attach
from elastic_dp.cluster.runs.attach import LiveController
from elastic_dp.cluster.runs.ended_run import EndedRun
from elastic_dp.config import DataConfig, JobSpec
from elastic_dp.errors import ClusterError, SpecError
from elastic_dp.storage import StorageURL

SPEC = JobSpec(name="job", data=DataConfig("-", micro_batch_size=1), max_steps=1)


@pytest.fixture
def rays(monkeypatch, tmp_path):
    """Rays by their addresses: the folder of each run named "job"; one that has ended begins with
    "-"; None is a Ray that does not answer, "" one without a run. The home folder is empty."""
    here = types.SimpleNamespace(runs={}, at=None)

    def connect(address):
        here.at = address or next(iter(here.runs), None)
        if here.at is None or here.runs.get(here.at) is None:
            raise ClusterError("nobody answers")

    def connects(address):
        here.at = None if here.runs[address] is None else address
        return here.at is not None

    def find(name):
        folder = here.runs[here.at] if name == "job" else ""
        if not folder:
            return None
        url = StorageURL(folder.removeprefix("-"))
        return LiveController(here.at, SPEC, url, ended=folder.startswith("-"))

    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(attach.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(attach.ray, "shutdown", lambda: None)
    connection = types.SimpleNamespace(
        connect=connect,
        connects=connects,
        clusters_of_this_user=lambda: [one for one in here.runs if not one.startswith("other")],
        clusters_here=lambda: {"other:9": os.getuid() + 1, "a:1": os.getuid()},
    )
    monkeypatch.setattr(attach, "cluster_connection", connection)
    monkeypatch.setattr(attach, "find", find)
    monkeypatch.setattr(attach, "names", lambda: ["job"] if here.runs[here.at] else [])
    monkeypatch.setattr(attach, "read_result", lambda url: None)
    monkeypatch.setattr("elastic_dp.cluster.run_handle.read_result", lambda url: None)
    monkeypatch.setattr(attach, "address", lambda: here.at)
    return here


def noted(folder, address, holds=True):
    """A run's folder whose last start was on the Ray at `address`."""
    from elastic_dp.checkpoint.lease import Lease
    from elastic_dp.storage import Store

    folder.mkdir(parents=True)
    (folder / "run.json").write_text("{}")
    limits = {"max_steps": 9, "epochs": None, "max_time_s": None, "stopped": False}
    start = {"format": 1, "code": "", "python": "3", "limits": limits, "ray": address}
    (folder / "start.json").write_text(json.dumps(start))
    if holds:
        Lease(Store(str(folder)), "it", "2", wall=lambda: 0.0).acquire()
    return str(folder)


@pytest.mark.parametrize(
    ("runs", "address", "expected"),
    [
        ({"a:1": "", "b:2": "/x/job"}, None, "b:2"),
        ({"a:1": "/x/job", "b:2": ""}, None, "a:1"),
        ({"a:1": None, "b:2": "/x/job", "c:3": ""}, None, "b:2"),
        ({"a:1": "-/y/job", "b:2": "/x/job"}, None, "b:2"),
        ({"a:1": "/y/job", "b:2": "/x/job"}, None, r"2 Ray clusters .* a:1 \(/y/job\), b:2"),
        ({"a:1": "/y/job", "b:2": "/x/job"}, "a:1", "a:1"),
        ({"a:1": "", "b:2": ""}, None, "no run named 'job' is live on a:1 or b:2, which has: none"),
        ({"a:1": "", "b:2": "/x/job"}, "a:1", "no run named 'job' is live on a:1"),
        ({"other:9": "/x/job", "b:2": ""}, None, "no run named 'job' is live on b:2"),
        ({}, None, "nobody answers"),
    ],
)
def test_run_of_which_only_the_name_is_known(runs, address, expected, rays):
    rays.runs = runs
    if expected in runs:
        assert find_run("job", address, None, None).controller == rays.at == expected
    else:
        with pytest.raises(ClusterError, match=expected):
            find_run("job", address, None, None)


@pytest.mark.parametrize("note", ["a:1", "b:2", "gone:7", "other:9"])
@pytest.mark.parametrize("by", ["path", "folder", "default"])
def test_run_of_a_folder_is_found_whatever_ray_the_folder_names(note, by, rays, tmp_path):
    parent = tmp_path / "home/elastic_dp_runs" if by == "default" else tmp_path / "runs"
    folder = noted(parent / "job", note)
    elsewhere = "" if by == "default" else "/y/job"
    rays.runs = {"a:1": elsewhere, "b:2": folder, "other:9": folder}
    where = {"path": ("job", str(parent)), "folder": (folder, None), "default": ("job", None)}[by]
    name, path = name_and_path(*where)
    assert find_run(name, None, path, None).controller == "b:2"
    rays.runs = dict.fromkeys(rays.runs, elsewhere and "/y/job")
    assert isinstance(find_run(name, None, path, None), EndedRun)


def test_folder_and_storage_path_together_are_refused():
    with pytest.raises(SpecError, match="leave out --storage-path"):
        name_and_path("runs/job", "runs")


@pytest.mark.parametrize(
    ("ray", "folder", "path", "refused"),
    [
        ("other:9", "own", None, False),
        ("other:9", "/nowhere/job", None, True),
        ("other:9", "s3://bucket/job", None, True),
        ("other:9", "s3://bucket/job", "s3://bucket", False),
        ("a:1", "/nowhere/job", None, False),
        ("far:8", "/nowhere/job", None, False),
    ],
)
def test_run_on_the_ray_of_another_user_is_steered_by_its_owner_alone(
    ray, folder, path, refused, rays, tmp_path
):
    folder = noted(tmp_path / "runs/job", ray) if folder == "own" else folder
    rays.runs = {ray: folder}

    def steers():
        if path is None:
            find_live_run("job", ray, None, None)  # as each verb that steers does
        else:
            attach.check_may_steer(find_run("job", ray, None, None), path)

    if refused:
        with pytest.raises(ClusterError, match="is of another user of this machine"):
            steers()
    else:
        steers()
