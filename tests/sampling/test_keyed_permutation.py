"""The generator is pinned: a change of any value here changes the order of every run there is.

Permutations were pinned again with "order 2", whose rounds mix once where they mixed twice.
"""

from collections import Counter
from itertools import pairwise, product

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from elastic_dp.sampling.keyed_permutation import derive, mix64_words, permute
from elastic_dp.sampling.seeds import batch_seed, body_seed, generator_for, seed_for


def permutation(size, key):
    sizes, keys = np.full(size, size, dtype=np.uint64), np.full(size, key, dtype=np.uint64)
    return permute(np.arange(size), sizes, keys).tolist()


def test_golden_words_are_unchanged():
    words = mix64_words(np.array([1, 1 << 63], dtype=np.uint64))
    assert words.tolist() == [0x5692161D100B05E5, 0x25C26EA579CEA98A]
    assert derive(0) == 0x910A2DEC89025CC1
    assert derive(1, 2, 3) == 0x1072DECA7455826
    assert derive(3, 2, 1) == 0x51BF25161A05FB1B
    assert derive(18446744073709551616, 5) == 0x8728E6207EE3BEE5


def test_golden_permutations_are_unchanged():
    assert permutation(1, 0) == [0]
    assert permutation(2, 1) == [0, 1]
    assert permutation(5, 2) == [2, 4, 0, 3, 1]
    assert permutation(16, 3) == [2, 9, 5, 1, 6, 12, 13, 0, 8, 4, 11, 15, 3, 7, 10, 14]


def test_golden_seeds_are_unchanged():
    assert seed_for(0, 1, 0) == 0x40268385D4FCF1A3
    assert seed_for(0, 1, 1) == 0xF541939D51746FCD
    assert seed_for(7, 1000, 3) == 0x5402D01BFEF7AF2B
    assert body_seed(0, 1) == 0x6C5795E14B3B7E33
    assert body_seed(7, 1000) == 0x348EE6C2088ECEDC


def test_batch_and_forward_pass_draw_from_different_seeds():
    positions = list(product(range(3), range(1, 20), range(8)))
    seeds = [made(*position) for position in positions for made in (seed_for, batch_seed)]
    assert len(set(seeds)) == 2 * len(positions)


def test_golden_generators_are_unchanged():
    """The bits of Philox, which NumPy keeps; no method of the generator is pinned, since it keeps
    none."""
    words = [0xF1CED3E4AB64D674, 0x188CFF074D7E584E, 0x53A0293C6EAB2831]
    for (step, v), word in zip([(1, 0), (1, 1), (1000, 3)], words, strict=True):
        assert generator_for(7, step, v).bit_generator.random_raw() == word
    assert len({generator_for(*key).integers(1 << 62) for key in product(range(4), repeat=3)}) == 64


@given(size=st.integers(1, 3000), key=st.integers(0, 2**64 - 1))
def test_permutation_contains_each_index_once(size, key):
    assert sorted(permutation(size, key)) == list(range(size))


def test_each_element_has_its_own_size_and_key():
    sizes, keys = [1, 7, 7, 1000], [3, 4, 5, 6]
    together = permute(
        np.array([0, 2, 2, 999]), np.array(sizes, dtype=np.uint64), np.array(keys, dtype=np.uint64)
    )
    alone = [permutation(n, k)[i] for n, k, i in zip(sizes, keys, [0, 2, 2, 999], strict=True)]
    assert together.tolist() == alone


def test_small_permutations_are_all_equally_likely():
    seen = Counter(tuple(permutation(4, derive(key))) for key in range(6000))
    assert len(seen) == 24
    assert all(
        170 < count < 340 for count in seen.values()
    )  # 250 expected, ± 5.8 standard deviations


def test_neighbours_are_torn_apart():
    order = permutation(10_000, derive(1, 2))
    assert sum(abs(a - b) == 1 for a, b in pairwise(order)) < 12  # 2 expected
    assert abs(np.corrcoef(np.arange(10_000), order)[0, 1]) < 0.04


def test_seeds_differ_in_every_argument():
    seeds = {seed_for(s, t, v) for s in range(20) for t in range(20) for v in range(20)}
    seeds |= {body_seed(s, t) for s in range(20) for t in range(20)}
    assert len(seeds) == 8400
    assert all(0 <= seed < 2**64 for seed in seeds)


def test_seeds_take_any_job_seed():
    assert len({seed_for(seed, 1, 0) for seed in (0, 2**64 - 1, 2**64, 2**64 + 1, 2**200)}) == 5
