"""Members have different weights: those that differ are replaced, and so are all that trained with
them.

Their gradients have moved the others since all were last seen to agree, so no member's state
counts; and a process never goes back. So every worker with state is replaced, and the run goes on
from the newest checkpoint of then or before. Without one it fails, as if all were lost: to begin
anew is the user's decision. It also fails where the weights differ again and again before all agree
once more, since then the job causes it.
"""

from elastic_dp.coordinator import closing
from elastic_dp.coordinator.generation import Generation
from elastic_dp.coordinator.state_lineage import StateLineage
from elastic_dp.coordinator.worker_registry import WorkerRegistry

MAX_IN_A_ROW = 3  # without a step between them after which all agreed


def reject(
    registry: WorkerRegistry, generation: Generation, lineage: StateLineage, now: float
) -> None:
    """Once every member has stopped."""
    mismatch = generation.mismatch
    assert mismatch is not None
    times = lineage.reject(mismatch.agreed)
    names = ", ".join(mismatch.odd)
    what = f"the weights of {names} differ; all workers agreed after step {mismatch.agreed}"
    registry.run.explain(what)
    if times > MAX_IN_A_ROW:
        error = f"{what}; this is time {times}: does something in the job differ between workers?"
        closing.fail(registry, error, "", now)
        return
    for worker in [*generation.members.values(), *registry.retained.values()]:
        if worker.has_state and worker.id in mismatch.odd:
            registry.evict(worker, "its weights differ from the others'", now)
        elif worker.has_state:
            registry.release(worker, f"trained with {names}, whose weights differed", now)
