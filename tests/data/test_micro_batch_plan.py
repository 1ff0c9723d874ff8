"""What may wait to be taken, of a step with many micro-batches."""

from elastic_dp.data.pipeline.micro_batch_plan import (
    STEPS_AHEAD,
    ChunkPacker,
    MicroBatch,
    MicroBatchPlan,
)

MICRO_BATCHES, NBYTES = 64, 1 << 20


def a_plan(ahead_bytes: int) -> MicroBatchPlan:
    """One step of `MICRO_BATCHES`, each a chunk of its own."""
    plan = MicroBatchPlan(1, ahead_bytes, lambda: 1, lambda step: step)
    plan.move(1, set(range(MICRO_BATCHES)))
    packer = ChunkPacker(0, lambda work, next_work: True, lambda step: step)
    planned = [MicroBatch(1, v, None, 1) for v in range(MICRO_BATCHES)]
    plan.add(packer.pack(planned), dict.fromkeys(range(MICRO_BATCHES), 2))
    return plan


def made(plan: MicroBatchPlan) -> list[int]:
    """Make all chunks for which there is room. Returns their virtual workers."""
    found = []
    while (chunk := plan.begin_next()) is not None:
        found += [m.virtual_worker for m in chunk.micro_batches]
        plan.end(chunk, [None] * len(chunk.micro_batches), NBYTES)
    return found


def test_the_bytes_of_the_present_step_are_limited_too():
    plan = a_plan(ahead_bytes=8 * NBYTES)
    assert made(plan) == [*range(8)]
    plan.take(1, 0)
    assert made(plan) == [8]


def test_a_few_micro_batches_of_the_present_step_wait_whatever_their_bytes():
    plan = a_plan(ahead_bytes=0)
    assert made(plan) == [*range(STEPS_AHEAD)]


def test_a_micro_batch_that_is_taken_out_of_turn_needs_no_room():
    plan = a_plan(ahead_bytes=8 * NBYTES)
    assert len(made(plan)) == 8
    plan.take(1, 50)
    assert made(plan) == [50]
    plan.take(1, 60)  # for which a producer finds the plan changed
    chunk = plan.begin_next()
    assert chunk is not None
    plan.put_back(chunk)
    assert made(plan) == [60]
