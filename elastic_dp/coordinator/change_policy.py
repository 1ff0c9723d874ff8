"""When a running generation should end as planned, for a better one.

For another size, for workers that join, for members whose nodes go away, for a better split of the
virtual workers, or to replace a slow member by a standby; in this order. Users read the reason.

Workers that are ready join at once where they take all free places. Otherwise a burst is to make
one change, or two: they wait for others that build, and the next ones for some time after a join.
Nobody waits for a worker that is not even started, since it may never be.
"""

import math

from elastic_dp.coordinator.balance import Balance
from elastic_dp.coordinator.drain_checkpointer import DrainCheckpointer, names
from elastic_dp.coordinator.generation import Generation
from elastic_dp.coordinator.run_state import RunState
from elastic_dp.coordinator.worker_registry import WorkerRegistry
from elastic_dp.wording import counted


class ChangePolicy:
    def __init__(
        self,
        run: RunState,
        registry: WorkerRegistry,
        generation: Generation,
        checkpointer: DrainCheckpointer,
    ) -> None:
        self.run, self._registry, self._generation = run, registry, generation
        self._checkpointer = checkpointer
        self._balance = Balance(generation, run.config.slow_s)
        self._joined_at = -math.inf  # when a generation was last formed for joiners, too
        self._told_until = -math.inf  # that joiners wait

    def joined(self, now: float) -> None:
        """A generation is formed in which some members have no state yet."""
        self._joined_at = now

    def consider_change(self, now: float) -> None:
        """Plan the end of the running generation, where there is a reason."""
        run, generation = self.run, self._generation
        if run.stop is not None or len(generation.not_finished) < len(generation.members):
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
            self._drain(present, waiting, now)
        elif joins_at == math.inf:
            self._balance_speeds(present, waiting, now)

    def _join_at(self, free: int, now: float) -> float:
        """From when on ready workers may join, for `free` places; inf: not at all."""
        if free <= 0 or not self._registry.ready:
            return math.inf
        at, why = self._burst_over(free)
        if at > max(now, self._told_until) + self.run.config.heartbeat_interval_s:
            self._told_until = at
            who = counted(len(self._registry.ready), "worker waits", "workers wait")
            self.run.explain(f"{who} for up to {at - now:.2g} s: {why}")
        return at

    def _burst_over(self, free: int) -> tuple[float, str]:
        """When, and what is waited for until then."""
        registry, config = self._registry, self.run.config
        since = registry.ready_since
        if len(registry.ready) >= free:
            return since, ""
        if registry.building:
            wait_s = max(config.join_window_s, config.stabilization_s)
            return since + wait_s, "others will be ready soon"
        after = self._joined_at + config.stabilization_s
        return max(since + config.join_window_s, after), "others may come soon"

    def _drain(self, present: int, waiting: int, now: float) -> None:
        """Some members' nodes will go: end when they are replaced, or their time has come."""
        run, checkpointer, draining = self.run, self._checkpointer, self._generation.draining
        due, who = checkpointer.due(now), names(draining.values())
        if present - len(draining) + waiting < run.least and run.config.keeps:
            checkpointer.foresee(now)
        if not (due or waiting or present - len(draining) >= run.size):
            return
        made_a_step = self._generation.steps.step
        if present - len(due or draining) + waiting >= run.least:
            self._generation.plan_end(f"{who} drained")
        elif due and run.config.keeps and made_a_step and checkpointer.in_time(due, now):
            self._generation.plan_end(f"{who} must leave, and too few are left", at_once=True)
        else:
            needed = counted(run.least, "worker is needed", "workers are needed")
            run.say(f"{who} should leave, but {needed}")

    def _balance_speeds(self, present: int, waiting: int, now: float) -> None:
        """A better split, or, where none helps, a standby for the slowest."""
        reason = self._balance.why_change(now)
        if reason is not None:
            self._generation.plan_end(reason)
        elif waiting and (slow := self._balance.too_slow(now)) is not None:
            why = "the others wait for it, though it runs the least"
            self.run.explain(f"a standby replaces {slow}: {why}")
            self._registry.drain(self._registry.workers[slow], None, now, why)
            self._drain(present, waiting, now)
