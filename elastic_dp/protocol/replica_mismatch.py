"""Members hold different weights: whoever is odd goes, and so do all who trained with it.

Its gradients have moved the others since they were last seen to agree, so nobody's state counts; and a process never goes
back. So all who hold a state are replaced, and the run goes on from the newest checkpoint of then or before. Without one it
fails, as if all were lost: to begin anew is the user's decision. So it does where it happens again and again
before they agree once more, since then the job does it.
"""

from elastic_dp.protocol import closing
from elastic_dp.protocol.generation import Generation
from elastic_dp.protocol.state_lineage import StateLineage
from elastic_dp.protocol.worker_registry import WorkerRegistry

MAX_IN_A_ROW = 3  # without a step between them after which all agreed


def reject(
    registry: WorkerRegistry, generation: Generation, lineage: StateLineage, now: float
) -> None:
    """As every member has stopped."""
    said = generation.mismatch
    assert said is not None
    times = lineage.reject(said.agreed)
    names = ", ".join(said.odd)
    what = f"the weights of {names} differ; all workers agreed after step {said.agreed}"
    registry.run.explain(what)
    if times > MAX_IN_A_ROW:
        error = f"{what}; this is time {times}: does something in the job differ between workers?"
        closing.fail(registry, error, "", now)
        return
    for worker in [*generation.members.values(), *registry.retained.values()]:
        if worker.has_state and worker.id in said.odd:
            registry.evict(worker, "its weights differ from the others'", now)
        elif worker.has_state:
            registry.release(worker, f"trained with {names}, whose weights differed", now)
