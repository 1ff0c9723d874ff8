"""A replica whose weights go wrong is found, and the run goes back to when all agreed: equal to the
undisturbed one."""

import dataclasses

import pytest
import torch

from elastic_dp.config import CheckpointConfig
from elastic_dp.coordinator.messages import ReplicaMismatch
from elastic_dp.errors import GroupError
from elastic_dp.train.fault_injection import WorkerFault
from elastic_dp.train.state.tensor_digests import digest_of, sums_of
from elastic_dp.train.step.participants import WeightComparison
from tests.runs import PATIENT, group, lines_of, local, never_put_off, spec_of, texts_of
from tests.train.checkpointing.test_worker_checkpointer import steps_of, when_committed
from tests.train.jobs import plain


def job(every=6, keep=5, **options):
    failure = dataclasses.replace(PATIENT, compare_weights_every=every)
    every_steps = CheckpointConfig(every_steps=keep)
    return spec_of(steps=24, checkpoint=every_steps, failure=failure, **options)


def flip(step, tmp_path, rank=1):
    """At the beginning of that step, so that its gradient is wrong as well, and moves the
    others."""
    path = str(tmp_path / "flipped")
    return WorkerFault("before_forward", step, rank, action="flip", once=path, settled=True)


@pytest.fixture(scope="module")
def calm():
    return local(job(), plain).digest


@pytest.mark.parametrize("workers", [3, 2])
def test_a_flipped_bit_costs_the_steps_since_all_agreed(workers, calm, tmp_path):
    """With two there is no majority. Seen after step 12, last agreed after 10, which is a
    checkpoint."""
    url, committed = str(tmp_path / "run"), tmp_path / "committed"
    gates = {"gates": {11: str(committed)}}
    spec = job(workers=workers, min_workers=workers, config=gates)
    script = [(10, when_committed(url, 10, lambda run: committed.touch()))]
    train = never_put_off(plain)
    outcome, run = group(spec, train, faults=(flip(12, tmp_path),), script=script, url=url)
    assert (tmp_path / "flipped").exists()
    assert (outcome.step, outcome.digest) == (24, calm)
    said = texts_of(run)
    assert any("all workers agreed after step 10" in text for text in said), said
    assert any("back to step 10" in text for text in said), said
    evicted = [x for x in lines_of(run) if x.get("command") == "EvictWorker"]
    assert len({x["worker"] for x in evicted if "differ" in x["reason"]}) == (
        1 if workers == 3 else 2
    )
    assert steps_of(url)[-1] == 24


def test_flipped_bit_without_a_checkpoint_fails_the_run_with_the_way_out(tmp_path):
    spec = dataclasses.replace(job(min_workers=3), checkpoint=CheckpointConfig())
    outcome, _ = group(
        spec, plain, faults=(flip(8, tmp_path),), url=str(tmp_path / "run"), fails=True
    )
    assert "no checkpoint of step 6 or earlier" in outcome.error


def weights(every=4, members=("w1", "w2", "w3")):
    made = WeightComparison({"a": torch.ones(3)}, every)
    made.members = members
    return made


def proposed(made, step):
    made.begin(step + 1)
    return made.propose()


def test_weights_are_compared_when_due_and_only_once():
    made = weights()
    assert [s for s in (0, 3, 4, 5, 8) if proposed(made, s)] == [4, 8]
    made.wanted = 5
    digest = proposed(made, 5)
    made.agree([digest, b"", digest])  # a joiner does not know that it is due
    assert (made.agreed, proposed(made, 5), proposed(made, 4)) == (5, b"", b"")
    alone = weights(members=("w1",))
    assert (proposed(alone, 4), alone.agreed) == (b"", 4)
    assert not proposed(weights(every=None), 4)


@pytest.mark.parametrize(
    ("digests", "odd"),
    [
        ([b"a", b"b", b"a"], ("w2",)),
        ([b"a", b"b", b"c"], ("w1", "w2", "w3")),
        ([b"a", b"b", b""], ("w1", "w2")),
    ],
)
def test_the_majority_decides_who_is_odd(digests, odd):
    made = weights()
    made.begin(5)
    made.agree([b"a"] * 3)
    made.begin(9)
    with pytest.raises(GroupError):
        made.agree(digests)
    assert made.mismatch == ReplicaMismatch(4, odd)


def test_members_that_update_the_same_part_with_other_bits_are_odd():
    made = weights()
    made.agreed = 4
    made.compare_updates(6, set())
    assert made.mismatch is None
    with pytest.raises(GroupError, match="differ after step 7: w1, w3"):
        made.compare_updates(7, {2, 0})
    assert made.mismatch == ReplicaMismatch(4, ("w1", "w3"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.bool])
def test_any_flipped_bit_shows(dtype):
    tensor = torch.ones(4, 5).to(dtype)
    other = tensor.clone().t().contiguous().t()  # in another order of bytes
    assert digest_of([tensor]) == digest_of([other])
    flipped = tensor.clone()
    flipped.view(-1).view(torch.uint8)[3] ^= 1
    assert digest_of([flipped]) != digest_of([tensor])
    assert sums_of([flipped]) != sums_of([tensor])
    assert digest_of([torch.empty(0)]) == digest_of([torch.empty(0)])


def test_updates_of_a_sharded_state_are_compared_when_weights_are():
    def compared(every):
        made = weights(every=every)
        return [step for step in range(1, 10) if made.compares_updates(step, keeps=step == 5)]

    assert compared(3) == [3, 5, 6, 9]
    assert compared(None) == []


def test_an_empty_tensor_of_any_strides_has_a_digest():
    empty, other = torch.empty(0).as_strided((0,), (0,)), torch.ones(2)
    assert digest_of([empty, other]) == digest_of([other])
