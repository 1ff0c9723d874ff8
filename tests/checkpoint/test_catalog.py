"""Which commit records count, which are kept, and that nothing else is deleted."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_dp.checkpoint.catalog import Catalog, Claim, CommitName, Keep, history, to_keep
from elastic_dp.checkpoint.checkpoint_reader import load_newest
from elastic_dp.errors import CheckpointError, LeaseLost
from tests.checkpoint.states import big_tree, checkpoint, memory_store, same


def names(*pairs):
    return [CommitName(step, fence) for step, fence in pairs]


CHAINS = {
    "one claim": ([(1, 1), (2, 1)], [(1, 0, 0)], [(1, 1), (2, 1)]),
    "nothing at all": ([], [], []),
    "no claims, as in a copied folder": ([(1, 1), (2, 1)], [], [(1, 1), (2, 1)]),
    "went on from the newest": (
        [(1, 1), (2, 1), (3, 4)],
        [(1, 0, 0), (4, 1, 2)],
        [(1, 1), (2, 1), (3, 4)],
    ),
    "a frozen controller's late commit record": (
        [(1, 1), (2, 1), (3, 1)],
        [(1, 0, 0), (4, 1, 2)],
        [(1, 1), (2, 1)],
    ),
    "went on from an older one": (
        [(1, 1), (2, 1), (2, 5)],
        [(1, 0, 0), (5, 1, 1)],
        [(1, 1), (2, 5)],
    ),
    "restarted": ([(1, 1), (9, 1), (1, 3)], [(1, 0, 0), (3, 0, 0)], [(1, 3)]),
    "back, and back again": (
        [(5, 1), (7, 1), (6, 2), (6, 3)],
        [(1, 0, 0), (2, 1, 5), (3, 1, 5)],
        [(5, 1), (6, 3)],
    ),
    "back beyond a whole claim": (
        [(5, 1), (7, 2), (9, 2), (6, 3)],
        [(1, 0, 0), (2, 1, 5), (3, 1, 4)],
        [(6, 3)],
    ),
    "claimed and died at once": ([(5, 1)], [(1, 0, 0), (2, 1, 5), (3, 1, 5)], [(5, 1)]),
}


@pytest.mark.parametrize("case", CHAINS)
def test_history_follows_claims_back_to_the_start(case):
    committed, claims, expected = CHAINS[case]
    assert history(names(*committed), [Claim(*claim) for claim in claims]) == names(*expected)


@given(
    st.sets(st.integers(1, 60), max_size=12),
    st.integers(1, 4),
    st.one_of(st.none(), st.integers(1, 20)),
    st.one_of(st.none(), st.sampled_from(["max", "min"])),
    st.data(),
)
def test_keep_retains_the_newest_every_nth_and_the_best(steps, num, every, order, data):
    committed = names(*((step, 1) for step in sorted(steps)))
    metrics = {
        name: {"m": data.draw(st.floats())} for name in committed if data.draw(st.booleans())
    }
    keep = Keep(num, every, "m" if order else None, order or "max")
    kept = to_keep(committed, keep, metrics)
    if committed:
        assert committed[-1] in kept
    assert len(kept) >= min(num, len(committed))
    assert {name for name in committed if every and name.step % every == 0} <= kept
    extra = [name for name in kept if not (every and name.step % every == 0)]
    assert len(extra) <= num + 1
    if order is None and committed:
        assert set(committed[-num:]) <= kept
    values = {name: m["m"] for name, m in metrics.items() if m["m"] == m["m"]}
    if order and values:
        best = (max if order == "max" else min)(values.values())
        assert any(values.get(name) == best for name in kept)


def objects(catalog):
    return {
        entry.path[len(catalog.folder) + 1 :] for entry in catalog.store.find(f"{catalog.folder}/")
    }


def test_retaining_deletes_the_commit_record_and_all_its_parts_and_leftovers():
    catalog = Catalog(memory_store())
    catalog.claim(1, None)
    for step in range(1, 6):
        checkpoint(catalog, step, big_tree(1000, seed=step), metrics={"loss": float(step)})
    checkpoint(catalog, 9, big_tree(3), fence=1)
    catalog.store.delete(catalog.path(CommitName(9, 1)))  # never committed
    catalog.store.write(f"{catalog.folder}/seals/.x.json.123.tmp", b"half")
    catalog.store.write(f"{catalog.folder}/notes.txt", b"the user's own")
    with pytest.raises(LeaseLost, match="after claim 0"):
        catalog.retain(Keep(1), 0)
    assert catalog.retain(Keep(2), 1, writing=[9]) == [1, 2, 3]
    assert any(name.startswith("step-000000000009") for name in objects(catalog))
    assert catalog.retain(Keep(1, score_attribute="loss", order="min"), 1) == []
    assert any(name.startswith("step-000000000009") for name in objects(catalog)), "may be going on"
    checkpoint(catalog, 10, big_tree(1000, seed=10), fence=1)
    assert catalog.retain(Keep(2), 1) == [4]
    left = objects(catalog)
    assert {name.partition("/")[0] for name in left} == {
        "seals",
        "notes.txt",
        "step-000000000005",
        "step-000000000010",
    }
    assert not any(name.endswith(".tmp") for name in left)
    assert [name.step for name in catalog.names()] == [5, 10]
    for name in catalog.names():
        assert same(
            load_newest(catalog, name.step, on_damage=pytest.fail)[1],
            big_tree(1000, seed=name.step),
        )


def test_parts_that_two_claims_share_outlive_the_older_commit_record():
    """A run that went back and did the same steps again writes the same objects."""
    catalog = Catalog(memory_store())
    tree = big_tree(1000)
    catalog.claim(1, None)
    for step in (1, 2):
        checkpoint(catalog, step, tree, fence=1)
    catalog.claim(2, CommitName(1, 1))
    checkpoint(catalog, 2, tree, fence=2)
    assert catalog.names() == names((1, 1), (2, 2))
    assert catalog.retain(Keep(5), 2) == [2]
    assert same(load_newest(catalog, on_damage=pytest.fail)[1], tree)


def test_a_commit_record_that_cannot_be_read_keeps_its_parts():
    catalog = Catalog(memory_store())
    checkpoint(catalog, 1, big_tree(1000))
    path = catalog.path(CommitName(1, 1))
    content = bytes(catalog.store.read_all(path))
    catalog.store.write(path, b"{}")
    catalog.retain(Keep(1), 1)
    catalog.store.write(path, content)
    assert same(load_newest(catalog, on_damage=pytest.fail)[1], big_tree(1000))


def test_a_claim_is_made_once_and_never_behind_another():
    catalog = Catalog(memory_store())
    catalog.claim(3, None)
    assert catalog.claim(3, None) == Claim(3, 0, 0), "repeated by its owner"
    for fence in (2, 3):
        with pytest.raises(LeaseLost, match="claim 3"):
            catalog.claim(fence, CommitName(1, 1))


def test_find_without_a_match_names_the_checkpoints_there_are():
    catalog = Catalog(memory_store())
    with pytest.raises(CheckpointError, match="no committed checkpoint; it has: none"):
        catalog.find()
    for step, accuracy in ((10, 0.5), (20, 0.9), (30, float("nan")), (40, 0.7)):
        checkpoint(catalog, step, {}, metrics={"accuracy": accuracy})
    assert catalog.find().step == 40 and catalog.find(20).step == 20
    with pytest.raises(CheckpointError, match="checkpoint of step 15; it has: 10, 20, 30, 40"):
        catalog.find(15)
    assert catalog.find("best", Keep(score_attribute="accuracy")).step == 20
    assert catalog.find("best", Keep(score_attribute="accuracy", order="min")).step == 10
    checkpoint(catalog, 50, {}, metrics={"nothing but": float("nan")})
    with pytest.raises(CheckpointError, match="metric 'nothing but'"):
        catalog.find("best", Keep(score_attribute="nothing but"))
    with pytest.raises(CheckpointError, match="metric 'loss'; they have: accuracy, nothing but"):
        catalog.find("best", Keep(score_attribute="loss"))
    with pytest.raises(CheckpointError, match="needs a metric"):
        catalog.find("best")
