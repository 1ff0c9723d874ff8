"""The units of a sharded optimizer's state in a checkpoint: whoever holds and writes them, it is
read bit for bit, and has one digest; what is missing or changed is named."""

import dataclasses

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic_dp.checkpoint import layout as layouts
from elastic_dp.checkpoint.catalog import Catalog, CommitName, blob_path
from elastic_dp.checkpoint.checkpoint_reader import load, verify
from elastic_dp.checkpoint.checkpoint_writer import write_commit, written_manifest
from elastic_dp.checkpoint.commit_record import CommitMetadata, CommitRecord
from elastic_dp.checkpoint.snapshot import Snapshot
from elastic_dp.errors import CheckpointDamaged, StateError
from elastic_dp.storage import Store
from tests.checkpoint.sharded_states import (
    held_by,
    held_by_two,
    pieces_of,
    sharded_checkpoint,
    whole_state,
    without_pieces,
    write_sharded,
)
from tests.checkpoint.states import memory_store, same
from tests.checkpoint.test_commit_record import _with


def digest_of(tree):
    """That of the checkpoint of a run whose optimizer is not sharded."""
    snapshot = Snapshot()
    snapshot.take(3, tree)
    return snapshot.manifest().digest


@given(
    shapes=st.lists(st.lists(st.integers(1, 9), max_size=3).map(tuple), max_size=5),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.uint8]),
    workers=st.integers(1, 5),
    unit=st.integers(1, 40),
    draw=st.randoms(use_true_random=False),
)
def test_state_is_read_bit_for_bit_whoever_holds_and_writes_its_units(
    shapes, dtype, workers, unit, draw
):
    tree = whole_state(draw.randrange(100), shapes=shapes, dtype=dtype)
    count = len(pieces_of(tree, unit))
    pairs = [tuple(draw.sample(range(workers), min(2, workers))) for _ in range(count)]
    lost = [draw.randrange(workers)] if workers > 1 else []
    catalog = Catalog(memory_store())
    options = {"workers": workers, "holders": pairs, "lost": lost, "unit": unit}
    committed = sharded_checkpoint(catalog, 3, tree, **options)
    assert same(load(catalog, committed), tree)
    assert digest_of(load(catalog, committed)) == digest_of(tree)
    assert verify(catalog, CommitName(3, 1)) == []
    other = sharded_checkpoint(Catalog(memory_store()), 3, tree, workers=2, unit=unit)
    assert committed.digest == other.digest
    assert CommitRecord.from_bytes(committed.to_bytes(), 3) == committed


def test_both_holders_have_the_same_files_and_the_backup_writes_those_of_a_lost_primary():
    tree, urls = whole_state(), {}
    for lost in ((), (0,), (1,), (2,)):
        catalog = Catalog(memory_store())
        committed = sharded_checkpoint(catalog, 3, tree, lost=lost)
        found = catalog.store.find(f"{catalog.folder}/")
        urls[lost] = {
            e.path[len(catalog.folder) :]: catalog.store.read_all(e.path)
            for e in found
            if "/seals/" not in e.path
        }
        assert same(load(catalog, committed), tree)
    first, *others = urls.values()
    assert len(first) >= 4
    assert all(one == first for one in others)


def test_files_of_units_have_a_limited_size(monkeypatch):
    monkeypatch.setattr(layouts, "MAX_BLOB_BYTES", 200)
    tree, catalog = whole_state(), Catalog(memory_store())
    committed = sharded_checkpoint(catalog, 3, tree, workers=1)
    blobs = divided_blobs(committed)
    assert len(blobs) > 3 and max(one.nbytes - len(one.header) for one in blobs) <= 200
    assert same(load(catalog, committed), tree)


def test_files_of_units_are_safetensors_files(tmp_path):
    tree, catalog = whole_state(), Catalog(Store(str(tmp_path)))
    committed = sharded_checkpoint(catalog, 3, tree)
    opened = {}
    for file in divided_blobs(committed):
        path = "/" + blob_path(catalog.folder, 3, file.name).lstrip("/")
        opened |= safetensors.torch.load_file(path)
    first = tree["step"]["optimizer"][0]["exp_avg"]
    spans = [(0, 10), (10, 20), (20, 30), (30, 35)]
    flat = torch.cat([opened[f"step.optimizer.0.exp_avg[{n}:{m}]"] for n, m in spans])
    assert torch.equal(flat, first.as_strided((35,), (1,)))
    assert torch.equal(opened["step.optimizer.4.row"], tree["step"]["optimizer"][4]["row"])


def test_checkpoint_without_all_of_its_units_is_not_committed():
    catalog, tree = Catalog(memory_store()), whole_state()
    reports = write_sharded(catalog, 3, tree)
    del reports["1"]  # its backup has not written them
    assert written_manifest(reports.values()) is None
    with pytest.raises(AssertionError):
        write_commit(catalog, list(reports.values()), 1, CommitMetadata())
    assert catalog.names() == []


@pytest.mark.parametrize("what", ["exp_avg", "none"])
def test_state_that_differs_on_two_holders_is_not_committed(what):
    catalog, tree = Catalog(memory_store()), whole_state()
    reports = write_sharded(catalog, 3, tree)
    other = whole_state()
    if what == "none":
        other["step"]["optimizer"][0]["none"] = 5
    else:
        other["step"]["optimizer"][0]["exp_avg"][0, 0] += 1.0
    snapshot = Snapshot()
    holders = held_by_two(len(pieces_of(other)), 3)
    snapshot.take(3, without_pieces(other), held_by(1, other, holders))
    reports["1"] = dataclasses.replace(reports["1"], manifest=snapshot.manifest())
    with pytest.raises(StateError, match=r"two members that hold a part of it at step 3.* on 0, 1"):
        write_commit(catalog, list(reports.values()), 1, CommitMetadata())
    assert catalog.names() == []


def divided_blobs(committed):
    return [
        blob
        for blob in committed.manifest.blobs
        if all(unit.tensor.startswith("step.optimizer.") for unit in blob.units)
    ]


def _entry(manifest):
    """That of the first parameter."""
    return manifest["trees"][1]


def _unit(manifest):
    return next(unit for blob in manifest["blobs"] for unit in blob if unit[0] == 5)


@pytest.mark.parametrize(
    "change",
    [
        lambda body: body.pop("about"),
        lambda body: body.update(fence="7"),
        lambda body: body["manifest"].update(step=-1),
        lambda body: body["manifest"].update(trees=5),
    ],
)
def test_commit_record_whose_fields_make_no_sense_is_damage(change):
    check_damage(change)


@pytest.mark.parametrize(
    "change",
    [
        lambda manifest: manifest.pop("blobs"),
        lambda manifest: manifest.update(blobs=5),
        lambda manifest: manifest["blobs"].pop(),
        lambda manifest: manifest["trees"].__setitem__(1, None),
        lambda manifest: _unit(manifest).__setitem__(0, 3),
        lambda manifest: _unit(manifest).__setitem__(0, 99),
        lambda manifest: _unit(manifest).__setitem__(2, 9),
        lambda manifest: _unit(manifest).__setitem__(1, -1),
        lambda manifest: _unit(manifest).__setitem__(3, 7),
        lambda manifest: _entry(manifest)[1][0].__setitem__(1, "os"),
        lambda manifest: _entry(manifest)[1][0].__setitem__(1, "save"),
        lambda manifest: _entry(manifest)[1][1].__setitem__(0, _entry(manifest)[1][0][0]),
        lambda manifest: _entry(manifest)[1][1].__setitem__(2, [-7, 5]),
    ],
)
def test_manifest_that_makes_no_sense_is_damage(change):
    check_damage(lambda body: change(body["manifest"]))


def check_damage(change):
    committed = sharded_checkpoint(Catalog(memory_store()), 3, whole_state())
    changed = _with(committed, change)
    with pytest.raises(CheckpointDamaged, match="its commit record cannot be read"):
        CommitRecord.from_bytes(changed, 3)


def test_digest_covers_each_unit_and_the_rest():
    digests = set()
    for change in range(4):
        tree = whole_state()
        if change == 1:
            tree["step"]["optimizer"][3]["exp_avg_sq"][3, 0, 5] += 1.0
        elif change == 2:
            tree["step"]["optimizer"][4]["lr"] = 0.2
        elif change == 3:
            tree["step"]["parameters"][0][0, 0] += 1.0
        digests.add(sharded_checkpoint(Catalog(memory_store()), 3, tree).digest)
    assert len(digests) == 4
    assert without_pieces(whole_state())["step"]["optimizer"] == [{}] * 5
