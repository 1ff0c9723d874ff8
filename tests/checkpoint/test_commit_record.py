"""What is committed is read bit for bit, by any number of readers; what was changed since is
noticed and named."""

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from elastic_dp.checkpoint.catalog import Catalog, CommitName
from elastic_dp.checkpoint.checkpoint_reader import load, load_newest, missing_files, verify
from elastic_dp.checkpoint.checkpoint_writer import (
    differences,
    owed_blobs,
    write_blobs,
    write_commit,
)
from elastic_dp.checkpoint.commit_record import CommitMetadata, CommitRecord
from elastic_dp.checkpoint.layout import canonical
from elastic_dp.checkpoint.snapshot import Snapshot
from elastic_dp.errors import CheckpointDamaged, CheckpointError, LeaseLost
from elastic_dp.storage import Store
from tests.checkpoint.states import big_tree, checkpoint, memory_store, same, save, train_state


def catalog_of(tmp_path):
    return Catalog(Store(str(tmp_path / "run [1]")))


@pytest.mark.parametrize("writers", [1, 3, 8])
def test_any_number_writes_and_each_byte_is_read_once(writers):
    tree = big_tree(5 << 20)
    catalog = Catalog(memory_store())
    committed = checkpoint(catalog, 7, tree, workers=writers)
    assert same(load(catalog, committed), tree)
    counted = catalog.store.counts
    assert counted.bytes_read == committed.nbytes


def test_strides_come_back():
    tree = big_tree(1000)
    catalog = Catalog(memory_store())
    back = load(catalog, checkpoint(catalog, 1, tree))
    assert back["last"].stride() == tree["last"].stride() and not back["last"].is_contiguous()


def test_a_training_state_is_adopted_from_a_checkpoint():
    there, here = train_state(1), train_state(2)
    catalog = Catalog(memory_store())
    save(catalog, there, 1)
    _, tree = load_newest(catalog, on_damage=lambda error: pytest.fail(str(error)))
    assert there.digest() != here.digest()
    here.adopt(tree, body=True)
    assert same(here.tree([], None), there.tree([], None))


def test_commit_with_a_missing_part_is_refused_and_what_differs_has_a_name():
    catalog, snapshot, other = Catalog(memory_store()), Snapshot(), Snapshot()
    tree = big_tree(3 << 20)
    snapshot.take(1, tree)
    tree["more"][0][0] += 1
    other.take(1, tree)
    manifest = snapshot.manifest()
    assert differences(manifest, other.manifest()) == ["more.0"]
    with ThreadPoolExecutor(2) as executor:
        how = {"members": "ab"}
        names = [*manifest.headers]
        first = write_blobs(catalog, snapshot, executor, writer="a", names=names[:1], **how)
        owed = owed_blobs([first])
        rest = write_blobs(catalog, snapshot, executor, writer="b", names=owed, **how)
    assert owed.keys() == set(names[1:])
    with pytest.raises(AssertionError):
        write_commit(catalog, [first], 1, CommitMetadata())
    assert catalog.names() == []
    write_commit(catalog, [first, rest], 1, CommitMetadata())
    assert catalog.names() == [CommitName(1, 1)]


def test_the_same_state_is_committed_once_and_another_is_refused():
    catalog = Catalog(memory_store())
    tree = big_tree(1000)
    checkpoint(catalog, 5, tree)
    before = bytes(catalog.store.read_all(catalog.path(CommitName(5, 1))))
    checkpoint(catalog, 5, tree, saved_at=1.0)
    assert bytes(catalog.store.read_all(catalog.path(CommitName(5, 1)))) == before
    tree["more"][1] = 4
    with pytest.raises(LeaseLost, match="two controllers"):
        checkpoint(catalog, 5, tree)


def test_every_flipped_byte_is_noticed_or_harmless(tmp_path):
    """In all files: loading gives the same bits or names the damage; `verify` finds every
    change."""
    catalog = catalog_of(tmp_path)
    tree = {"a": torch.arange(5), "b": [torch.ones(3), 0.5, "x"]}
    committed = checkpoint(catalog, 3, tree, metrics={"loss": 0.5})
    name = CommitName(3, 1)
    files = [file for file in Path(catalog.folder).rglob("*") if file.is_file()]
    assert len(files) == 2
    noticed = 0
    for file in files:
        content = file.read_bytes()
        for i in range(len(content)):
            changed = bytearray(content)
            changed[i] ^= 0x20
            file.write_bytes(changed)
            try:
                found = catalog.read(name)
                assert found.manifest == committed.manifest
                assert same(load(catalog, found), tree)
            except (CheckpointDamaged, CheckpointError):
                noticed += 1
            else:
                assert verify(catalog, name) or file.suffix == ".json"
        file.write_bytes(content)
    sizes = [len(file.read_bytes()) for file in files]
    assert noticed > 0.9 * (sizes[0] if files[0].suffix == ".json" else sizes[1])
    assert verify(catalog, name) == []


def swap(file, other):
    mine = file.read_bytes()
    file.write_bytes(other.read_bytes())
    other.write_bytes(mine)


CHANGES = {
    "cut": lambda file, other: file.write_bytes(file.read_bytes()[:-1]),
    "lengthen": lambda file, other: file.write_bytes(file.read_bytes() + b"x"),
    "swap": swap,
    "foreign": lambda file, other: file.write_bytes(bytes(len(file.read_bytes()))),
    "remove": lambda file, other: file.unlink(),
}


@pytest.mark.parametrize("change", ["cut", "swap", "foreign", "remove"])
def test_a_damaged_part_is_named_and_the_one_before_is_used(tmp_path, change):
    catalog = catalog_of(tmp_path)
    trees = {step: big_tree(3 << 20, seed=step) for step in (1, 2)}
    for step, tree in trees.items():
        checkpoint(catalog, step, tree)
    parts = sorted(Path(catalog.folder, "step-000000000002").rglob("*.safetensors"))
    CHANGES[change](parts[1], parts[2])
    told = []
    committed, tree = load_newest(catalog, on_damage=told.append)
    assert committed.step == 1 and same(tree, trees[1])
    assert len(told) == 1 and told[0].step == 2 and parts[1].name in str(told[0])
    assert verify(catalog, CommitName(2, 1)) and not verify(catalog, CommitName(1, 1))
    with pytest.raises(CheckpointDamaged, match="step 2 is damaged"):
        load_newest(catalog, 2, on_damage=told.append)


@pytest.mark.parametrize(
    ("change", "words"), [("cut", "not"), ("lengthen", "not"), ("remove", "is missing")]
)
def test_names_and_sizes_alone_tell_most(tmp_path, change, words):
    catalog = catalog_of(tmp_path)
    committed = checkpoint(catalog, 2, big_tree(3 << 20))
    assert missing_files(catalog, committed) == []
    parts = sorted(Path(catalog.folder).rglob("*.safetensors"))
    CHANGES[change](parts[1], parts[2])
    (wrong,) = missing_files(catalog, committed)
    assert wrong.startswith(f"step-000000000002/{parts[1].name} ") and words in wrong


def test_a_commit_record_under_another_name_is_not_taken(tmp_path):
    catalog = catalog_of(tmp_path)
    checkpoint(catalog, 2, {"x": torch.ones(1)})
    commits = Path(catalog.folder, "seals")
    (commits / str(CommitName(2, 1))).rename(commits / str(CommitName(9, 1)))
    with pytest.raises(CheckpointDamaged, match="that of step 2"):
        catalog.read(CommitName(9, 1))
    (commits / str(CommitName(9, 1))).rename(commits / str(CommitName(2, 5)))
    with pytest.raises(CheckpointDamaged, match="belongs to claim 1"):
        catalog.read(CommitName(2, 5))


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (6, "written by an earlier version of elastic_dp, .* Export it with the version"),
        (8, "written by a newer version of elastic_dp, and this one reads format 7"),
    ],
)
def test_another_format_is_refused_with_the_way_out(number, words):
    stored = json.loads(checkpoint(Catalog(memory_store()), 4, {"x": 1}).to_bytes())
    stored["elastic_dp_checkpoint"] = number
    with pytest.raises(CheckpointError, match=f"step 4 has format {number}: it was {words}"):
        CommitRecord.from_bytes(json.dumps(stored).encode(), 4)


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[]", b"null", b"\xff", b'{"body": 1, "digest": 2}']
)
def test_a_commit_record_that_is_none_is_damage(content):
    with pytest.raises(CheckpointDamaged, match="its commit record is"):
        CommitRecord.from_bytes(content, 4)


def test_the_digest_covers_the_step_the_values_and_every_byte():
    tree = {"x": torch.ones(2), "lr": 0.5}
    digests = set()
    for step, change in (
        (1, {}),
        (2, {}),
        (1, {"lr": 0.25}),
        (1, {"x": torch.zeros(2)}),
        (1, {"y": None}),
    ):
        snapshot = Snapshot()
        snapshot.take(step, tree | change)
        digests.add(snapshot.manifest().digest)
    assert len(digests) == 5


def test_a_state_without_tensors():
    catalog = Catalog(memory_store())
    committed = checkpoint(catalog, 1, {"only": "values"}, workers=2)
    assert load(catalog, committed) == {"only": "values"}
    assert committed.manifest.blobs == ()


def _with(commit, change):
    """Return its bytes after `change(body)`, with the digest that they then have."""
    stored = json.loads(commit.to_bytes())
    change(stored["body"])
    digest = hashlib.sha256(canonical(stored["body"])).hexdigest()
    return canonical(stored | {"digest": digest})


def test_fields_of_a_later_version_are_left_out():
    committed = checkpoint(Catalog(memory_store()), 3, {"x": torch.arange(4)})

    def add(body):
        for part in (body, body["about"], body["manifest"]):
            part["of a later version"] = [1]

    read = CommitRecord.from_bytes(_with(committed, add), 3)
    assert read.metadata == committed.metadata and read.manifest == committed.manifest
