import itertools

import pytest

from elastic_dp.distributed.reduction_tree import add_up, cover, fold, middle


def whole(node):
    """The tree itself, as nested pairs."""
    if node[1] - node[0] == 1:
        return node[0]
    split = middle(node)
    return (whole((node[0], split)), whole((split, node[1])))


@pytest.mark.parametrize("v", range(1, 18))
def test_every_contiguous_range_is_covered_by_whole_subtrees(v):
    for first, last in itertools.combinations(range(v + 1), 2):
        nodes = cover(first, last, v)
        assert [n for low, high in nodes for n in range(low, high)] == list(range(first, last))


@pytest.mark.parametrize("v", range(1, 18))
def test_a_split_range_adds_up_to_the_same_tree(v):
    for cut in range(1, v + 1):
        sums = {}
        for first, last in ((0, cut), (cut, v)):
            if first < last:
                sums |= run(first, last, v)
        assert add_up(sums, (0, v), lambda a, b, _: (a, b)) == whole((0, v))


def run(first, last, v):
    """What a worker does: `fold`'s leaves on a stack machine, as symbols."""
    stack = []
    for leaf in fold(first, last, v):
        hand = leaf.virtual_worker
        for _ in range(leaf.merges):
            hand = (stack.pop(), hand)
        stack.append(hand)
    return dict(zip(cover(first, last, v), stack, strict=True))


def test_the_tree_of_eight():
    assert whole((0, 8)) == (((0, 1), (2, 3)), ((4, 5), (6, 7)))
    assert whole((0, 5)) == (((0, 1), (2, 3)), 4)
    assert cover(3, 6, 8) == [(3, 4), (4, 6)]
