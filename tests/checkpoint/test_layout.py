"""Tensors in blobs: aligned, without gaps, cut alike for every number of workers; each blob a
safetensors file."""

from unittest.mock import patch

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic_dp.checkpoint import layout as layouts
from elastic_dp.checkpoint.codec import encode
from elastic_dp.checkpoint.layout import WORDS, Blob, TensorSpec, cut, flat_bytes, is_dense
from elastic_dp.checkpoint.snapshot import Snapshot
from tests.checkpoint.states import big_tree, same

DTYPES = ["bool", "uint8", "bfloat16", "float32", "int64", "complex128", "float8_e4m3fn"]
specs = st.lists(
    st.builds(
        TensorSpec,
        st.uuids().map(str),
        st.sampled_from(DTYPES),
        st.lists(st.integers(0, 9), max_size=3).map(tuple),
    ),
    max_size=8,
)


@given(specs, st.sampled_from([64, 128, 1024]), st.sampled_from([1, 2, 8]))
def test_every_byte_has_one_place(given_specs, unit, units_in_blob):
    with (
        patch.object(layouts, "MAX_UNIT_BYTES", unit),
        patch.object(layouts, "_MIN_BLOB_BYTES", unit * units_in_blob),
        patch.object(layouts, "_BLOBS", 1 << 20),
    ):
        lists = cut(given_specs)
    by_name = {spec.name: spec for spec in given_specs}
    ends = dict.fromkeys(by_name, 0)
    for units in lists:
        blob = Blob.of(units, by_name)
        assert len(blob.header) % 64 == 0
        for one, at in zip(units, blob.offsets, strict=False):
            size = by_name[one.tensor].itemsize
            assert one.start == ends[one.tensor] < one.end, "a gap or an overlap"
            assert (at - len(blob.header)) % size == one.start % size == one.end % size == 0
            assert one.nbytes <= unit
            ends[one.tensor] = one.end
    assert ends == {name: spec.nbytes for name, spec in by_name.items()}
    sizes = [sum(one.nbytes for one in units) for units in lists]
    assert set(sizes[:-1]) <= {unit * units_in_blob} and max(sizes, default=0) <= (
        unit * units_in_blob
    )


@pytest.mark.parametrize(
    ("nbytes", "mib", "count"),
    [(0, 1, 0), (1, 1, 1), (32 << 20, 1, 32), (500 * 10**6, 16, 30), (10**11, 64, 1491)],
)
def test_blobs_grow_with_the_state_up_to_a_limit(nbytes, mib, count):
    lists = cut([TensorSpec("t", "uint8", (nbytes,))])
    assert len(lists) == count
    assert all(sum(one.nbytes for one in units) == mib << 20 for units in lists[:-1])
    assert all(one.nbytes <= min(mib, 8) << 20 for units in lists for one in units)


@pytest.mark.parametrize("nbytes", [0, 1000, 3 << 20])
def test_blobs_open_with_the_library_of_the_format(nbytes):
    """Whole tensors under their names, and the units of a cut one, end to end, are the tensor."""
    tree = big_tree(nbytes)
    snapshot = Snapshot()
    snapshot.take(1, tree)
    pieces = {}
    for name in snapshot.manifest().headers:
        pieces |= safetensors.torch.load(bytes(snapshot.content(name)))
    for name, tensor in encode(tree)[1]:
        if tensor.is_contiguous() and name in pieces:
            assert same(pieces[name], tensor)
            continue
        mine = {key: piece for key, piece in pieces.items() if key.startswith(f"{name}[")}
        first = [int(key[len(name) + 1 :].partition(":")[0]) for key in mine]
        together = [
            piece for _, piece in sorted(zip(first, mine.values(), strict=True), key=lambda x: x[0])
        ]
        flat = torch.cat(together) if together else torch.empty(0)
        assert same(flat.view(torch.uint8), flat_bytes(tensor)), name


def test_dense_is_about_memory_and_not_about_order():
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    for tensor in (image, torch.ones(3, 4).t(), torch.ones(1, 3)[:, :], torch.tensor(1.0)):
        assert is_dense(tensor)
    for tensor in (torch.ones(1).expand(3), torch.ones(4, 4)[:, 1:], torch.ones(6)[::2]):
        assert not is_dense(tensor)
    assert same(flat_bytes(image).view(torch.float32), image.permute(0, 2, 3, 1).reshape(-1))


def test_a_snapshot_uses_its_memory_again():
    snapshot, tree = Snapshot(), big_tree(1 << 20)
    snapshot.take(1, tree)
    first, address = snapshot.manifest(), snapshot.memory.content.data_ptr()
    tree["whole"][5] += 1
    assert snapshot.manifest().digest == first.digest, "the copy followed the original"
    snapshot.take(2, tree)
    second = snapshot.manifest()
    assert snapshot.memory.content.data_ptr() == address
    assert len(second.units) - len(set(first.units.values()) & set(second.units.values())) == 1
    assert snapshot.memory.content.data_ptr() % 4096 == 0, "a blob goes to the disk without a copy"
    smaller = {"x": torch.ones(10)}
    snapshot.take(3, smaller)
    assert snapshot.memory.content.data_ptr() == address
    [name] = snapshot.manifest().headers
    assert same(safetensors.torch.load(bytes(snapshot.content(name))), smaller)


def test_a_tensor_that_becomes_contiguous_has_another_layout():
    snapshot = Snapshot()
    for tensor in (torch.randn(3, 4).t(), torch.randn(4, 3), torch.randn(4, 6)[:, ::2]):
        snapshot.take(1, {"x": tensor})
        [name] = snapshot.manifest().headers
        stored = next(iter(safetensors.torch.load(bytes(snapshot.content(name))).values()))
        assert same(stored.view(-1).view(torch.uint8), flat_bytes(tensor))


@pytest.mark.parametrize("name", WORDS)
def test_itemsize_of_a_dtype_without_torch_is_that_of_torch(name):
    assert TensorSpec("x", name, (3,)).nbytes == 3 * getattr(torch, name).itemsize
    assert TensorSpec("x", "complex128", (3,)).nbytes == 48  # one that safetensors does not have
