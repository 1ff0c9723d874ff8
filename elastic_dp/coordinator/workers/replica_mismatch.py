"""Acts on members with different weights: every worker with state is replaced.

The gradients of the members that differ have moved the others since all weights were last equal, so
no member's state is valid, and a process never goes back. The run continues from the newest
checkpoint of that time or earlier. Without one it fails, as if all workers were lost: the user
decides whether to start from the beginning. It also fails if the weights differ repeatedly before
all are equal once more, because then the job is the cause.
"""

from elastic_dp.coordinator import run_termination
from elastic_dp.coordinator.generation import Generation
from elastic_dp.coordinator.state_lineage import StateLineage
from elastic_dp.coordinator.workers.worker_registry import WorkerRegistry

MAX_IN_A_ROW = 3  # mismatches without a step in between after which all weights were equal


def reject(
    registry: WorkerRegistry, generation: Generation, lineage: StateLineage, now: float
) -> None:
    """Replace every worker with state, once every member has stopped."""
    mismatch = generation.mismatch
    assert mismatch is not None
    times = lineage.reject(mismatch.agreed)
    names = ", ".join(mismatch.odd)
    what = f"the weights of {names} differ; all workers agreed after step {mismatch.agreed}"
    registry.run.explain(what)
    if times > MAX_IN_A_ROW:
        error = (
            f"{what}; this is time {times} in a row: does something in the job differ between "
            "workers?"
        )
        run_termination.fail(registry, error, "", now)
        return
    for worker in [*generation.members.values(), *registry.retained.values()]:
        if worker.has_state and worker.id in mismatch.odd:
            registry.evict(worker, "its weights differ from the others'", now)
        elif worker.has_state:
            registry.release(worker, f"trained with {names}, whose weights differed", now)
