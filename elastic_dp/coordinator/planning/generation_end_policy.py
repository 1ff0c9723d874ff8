"""Decides when a running generation should end as planned, for a better one.

The reasons, in this order: another size, workers that join, members whose nodes go away, a better
split of the virtual workers. Users read the reason.

Ready workers join at once if they take all free places. Otherwise a burst of joiners should cause
one change, or two: ready workers wait for others that build their model, and after a join the next
ones wait for some time. No worker waits for one that has not started, because it may never start.
"""

import math

from elastic_dp.coordinator.drain_checkpointer import DrainCheckpointer
from elastic_dp.coordinator.generation import Generation
from elastic_dp.coordinator.planning.load_balancer import LoadBalancer
from elastic_dp.coordinator.run_state import RunState
from elastic_dp.coordinator.workers.worker_registry import WorkerRegistry
from elastic_dp.wording import counted, first_few


class GenerationEndPolicy:
    """Plans the end of a running generation."""

    def __init__(
        self,
        run: RunState,
        registry: WorkerRegistry,
        generation: Generation,
        checkpointer: DrainCheckpointer,
    ) -> None:
        self.run, self._registry, self._generation = run, registry, generation
        self._checkpointer = checkpointer
        self._load_balancer = LoadBalancer(generation)
        self._explained_until = -math.inf  # how long joiners wait, as last explained

    def plan_end_if_needed(self, now: float) -> None:
        """Plan the end of the running generation if there is a reason."""
        run, generation = self.run, self._generation
        if run.stop is not None or len(generation.not_finished) < len(generation.members):
            return
        if now < self._checkpointer.suspended_until(now):
            generation.plan_end("the head node goes away", at_once=True)
            return
        present, waiting = len(generation.members), len(self._registry.ready)
        joins_at = self._join_at(run.size - present, now)
        if now < joins_at:
            run.timers.wake(joins_at)
        if present > run.size:
            generation.plan_end(f"the size is {run.size} now")
        elif now >= joins_at:
            joiners = min(waiting, run.size - present)
            generation.plan_end(counted(joiners, "worker joins", "workers join"))
        elif generation.draining:
            self._drain(present, now)
        elif joins_at == math.inf:
            reason = self._load_balancer.reason_to_rebalance(now)
            if reason is not None:
                generation.plan_end(reason)

    def _join_at(self, free: int, now: float) -> float:
        """Return from when on ready workers may join `free` places; inf if they may not join."""
        if free <= 0 or not self._registry.ready:
            return math.inf
        at, why = self._burst_ends_at(free)
        if at > max(now, self._explained_until) + self.run.config.heartbeat_interval_s:
            self._explained_until = at
            who = counted(len(self._registry.ready), "worker waits", "workers wait")
            self.run.explain(f"{who} for up to {at - now:.2g} s: {why}")
        return at

    def _burst_ends_at(self, free: int) -> tuple[float, str]:
        """Return when the burst of joiners counts as over, and what the ready workers wait for
        until then.
        """
        registry, config = self._registry, self.run.config
        since = registry.ready_since
        if len(registry.ready) >= free:
            return since, ""
        if registry.building:
            wait_s = max(config.join_window_s, config.stabilization_s)
            return since + wait_s, "others will be ready soon"
        after = self._generation.joined_at + config.stabilization_s
        return max(since + config.join_window_s, after), "others may come soon"

    def _drain(self, present: int, now: float) -> None:
        """End the generation when its draining members are replaced, or when they must leave."""
        run, checkpointer, draining = self.run, self._checkpointer, self._generation.draining
        waiting = self._registry.successors
        due, who = checkpointer.due(now), first_few(draining)
        if present - len(draining) + waiting < run.min_members and run.config.checkpointing:
            checkpointer.request_ahead(now)
        if not (due or waiting or present - len(draining) >= run.size):
            return
        has_time = self._generation.steps.step and due and now < checkpointer.last_deadline(due)
        if present - len(due or draining) + waiting >= run.min_members:
            self._generation.plan_end(f"{who} drain")
        elif has_time and run.config.checkpointing:
            self._generation.plan_end(f"{who} must leave, and too few workers remain", at_once=True)
        else:
            needed = counted(run.min_members, "worker is needed", "workers are needed")
            run.set_reason(f"{who} must leave, but {needed}")
