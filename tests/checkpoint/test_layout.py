"""The line of bytes: aligned, without gaps, cut alike for every number of workers; each part a
safetensors file."""

import io

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic_dp.checkpoint.codec import encode
from elastic_dp.checkpoint.layout import WORDS, Layout, TensorSpec, flat_bytes, is_dense
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


@given(specs, st.sampled_from([64, 128, 1024]), st.sampled_from([1, 2, 8]), st.integers(1, 9))
def test_every_byte_has_one_place(given_specs, block, blocks_in_part, workers):
    layout = Layout(tuple(given_specs), block * blocks_in_part, block)
    covered = 0
    for piece in layout.pieces:
        assert piece.at == covered, "a gap or an overlap"
        size = layout.specs[piece.slot].torch_dtype.itemsize
        assert piece.at % size == piece.start % size == piece.end % size == 0
        covered += piece.end - piece.start
    assert covered == layout.total
    shares = [layout.share(rank, workers) for rank in range(workers)]
    assert [number for share in shares for number in share] == list(range(len(layout.parts)))
    blocks = [block for share in shares for block in layout.blocks_of(share)]
    assert blocks == list(range(layout.blocks))
    assert sum(part.end - part.start for part in layout.parts) == layout.total
    assert sum(end - start for start, end in map(layout.block_span, blocks)) == layout.total
    for part in layout.parts:
        assert part.data_at % 64 == 0
        assert part.at % 4096 == 0


@pytest.mark.parametrize(
    ("nbytes", "part_mib"), [(0, 1), (1, 1), (32 << 20, 1), (500 * 10**6, 16), (10**11, 64)]
)
def test_parts_grow_with_the_state_up_to_a_limit(nbytes, part_mib):
    layout = Layout.of([TensorSpec("t", "uint8", (nbytes,))])
    assert layout.part_bytes == part_mib << 20 and layout.block_bytes == min(part_mib, 8) << 20


@pytest.mark.parametrize("nbytes", [0, 1000, 3 << 20])
def test_parts_open_with_the_library_of_the_format(nbytes):
    """Whole tensors under their names, and the pieces of a cut one, end to end, are the tensor."""
    tree = big_tree(nbytes)
    snapshot = Snapshot()
    snapshot.take(1, tree)
    layout = snapshot.manifest().layout
    pieces = {}
    for part in layout.parts:
        pieces |= safetensors.torch.load(bytes(snapshot.part(part)))
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
    assert [a == b for a, b in zip(first.blocks, second.blocks, strict=True)].count(False) == 1
    assert snapshot.memory.content.data_ptr() % 4096 == 0, "a part goes to the disk without a copy"
    smaller = {"x": torch.ones(10)}
    snapshot.take(3, smaller)
    assert snapshot.memory.content.data_ptr() == address
    file = io.BytesIO(snapshot.part(snapshot.manifest().layout.parts[0]))
    assert same(safetensors.torch.load(file.read()), smaller)


def test_a_tensor_that_becomes_contiguous_has_another_layout():
    snapshot = Snapshot()
    for tensor in (torch.randn(3, 4).t(), torch.randn(4, 3), torch.randn(4, 6)[:, ::2]):
        snapshot.take(1, {"x": tensor})
        part = snapshot.manifest().layout.parts[0]
        stored = next(iter(safetensors.torch.load(bytes(snapshot.part(part))).values()))
        assert same(stored.view(-1).view(torch.uint8), flat_bytes(tensor))


@pytest.mark.parametrize("name", WORDS)
def test_itemsize_of_a_dtype_without_torch_is_that_of_torch(name):
    assert TensorSpec("x", name, (3,)).nbytes == 3 * getattr(torch, name).itemsize
    assert TensorSpec("x", "complex128", (3,)).nbytes == 48  # one that safetensors does not have
