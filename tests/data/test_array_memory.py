"""Memory is used again when nothing refers to it, and never before."""

import threading

import numpy as np
import torch

from elastic_dp.data.pipeline.array_memory import (
    ALIGNED_TO,
    SMALLEST_BYTES,
    BlockPool,
    aligned,
    aligned_part,
    is_aligned,
)

INT32 = np.dtype(np.int32)
ROWS = SMALLEST_BYTES // 4 // 4  # of 8 numbers: twice that


def address(array):
    return array.__array_interface__["data"][0]


def test_block_without_references_is_used_again():
    blocks = BlockPool(2)
    first = blocks.empty((ROWS, 8), INT32)
    where = address(first)
    first[...] = 7
    del first
    again = blocks.empty((ROWS - 100, 8), INT32)
    assert address(again) == where and again.shape == (ROWS - 100, 8) and again.dtype == INT32
    assert again.flags.writeable and again.flags.c_contiguous


def test_a_piece_a_tensor_or_a_view_of_it_keeps_the_whole():
    blocks = BlockPool(4)
    keepers = (
        lambda array: array[5:7],
        lambda array: torch.from_numpy(array[5:7]),
        lambda array: torch.from_numpy(array).view(torch.int8)[3:],
        lambda array: torch.from_numpy(array[5:7]).untyped_storage(),
        lambda array: memoryview(array)[5:7],
    )
    for keeper in keepers:
        array = blocks.empty((ROWS, 8), INT32)
        where, kept = address(array), keeper(array)
        del array
        other = blocks.empty((ROWS, 8), INT32)
        assert address(other) != where
        del other, kept
        held = [blocks.empty((ROWS, 8), INT32) for _ in range(2)]
        assert where in map(address, held)
        del held


def test_no_more_wait_than_may():
    blocks = BlockPool(2)
    arrays = [blocks.empty((ROWS, 8), INT32) for _ in range(5)]
    del arrays
    assert len(blocks._free) == 2
    small, large = blocks.empty((4,), INT32), blocks.empty((ROWS * 3, 8), INT32)
    assert len(blocks._free) == 2  # neither fits
    assert (small.nbytes, large.nbytes) == (16, 96 * ROWS)


def test_threads_never_share_one():
    blocks, wrong = BlockPool(4), []

    def work(mark):
        for _ in range(300):
            array = blocks.empty((ROWS, 8), INT32)
            array[::97] = mark
            if not (array[::97] == mark).all():
                wrong.append(mark)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_every_array_begins_where_torchs_own_would():
    """Otherwise MKL's matrix products would differ with it, and results would depend on the number
    of workers."""
    blocks = BlockPool(2)
    for count in (1, 3, 1000, SMALLEST_BYTES // 4 + 1, SMALLEST_BYTES // 4 + 1):
        array = blocks.empty((count,), INT32)
        assert is_aligned(array) and array.shape == (count,)
    whole = blocks.empty((64, 17), np.dtype(np.float32))
    whole[...] = np.arange(64 * 17).reshape(64, 17)
    for start in range(64):
        piece = aligned(whole[start:])
        assert address(piece) % ALIGNED_TO == 0 and np.array_equal(piece, whole[start:])
        assert np.shares_memory(piece, whole) == (start % 16 == 0)


def test_part_of_an_aligned_array_is_copied_only_where_it_begins_elsewhere():
    blocks = BlockPool(2)
    for width, dtype in ((1, np.int8), (17, np.float32), (16, np.int32)):
        whole = blocks.empty((100, width), np.dtype(dtype))
        whole[...] = np.arange(100 * width).reshape(100, width).astype(dtype)
        for start in range(100):
            part = aligned_part(whole, start, start + 7)
            assert is_aligned(part) and np.array_equal(part, whole[start : start + 7])
            shares = is_aligned(whole[start:])
            assert np.shares_memory(part, whole) == shares
