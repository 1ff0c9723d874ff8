"""Reports the phase of the training thread to heartbeats and to tests that inject faults."""

from __future__ import annotations

import time
from collections.abc import Callable

from elastic_dp.distributed.link_times import sending_s
from elastic_dp.train.controller_link import HeartbeatStatus
from elastic_dp.train.fault_injection import HANDING_OVER, FaultInjector
from elastic_dp.train.generations.generation_groups import GenerationGroups
from elastic_dp.train.generations.worker_progress import WorkerProgress

LOOK_S, LOOK_S_PER_MEMBER = 0.2, 0.005  # at least, between two looks at the links of a group


class PhaseReporter:
    def __init__(
        self,
        status: HeartbeatStatus,
        faults: FaultInjector,
        groups: GenerationGroups,
        progress: WorkerProgress,
    ) -> None:
        self._status, self._faults = status, faults
        self._groups, self._progress = groups, progress
        self.phase = "start"
        self._look_at = 0.0  # at the links of the group

    def report(self, phase: str) -> None:
        self.phase = phase
        membership = self._groups.membership
        generation = 0 if membership is None else membership.generation
        self._status.write(generation, self._progress.position.step, phase)
        group = self._groups.main
        if phase == "apply" and group is not None and group.links:
            now = time.monotonic()
            if now >= self._look_at:
                self._look_at = now + max(LOOK_S, LOOK_S_PER_MEMBER * group.world_size)
                self._status.write_sending(sending_s(group.links))

    @property
    def points(self) -> Callable[[str, int], None] | None:
        """`pass_point`, for code that runs in each micro-batch; None: no fault is planned."""
        return self.pass_point if self._faults.plan else None

    def pass_point(self, name: str, step: int | None = None) -> None:
        """Passes a named point at which a test may have planned a fault."""
        if self._faults.plan:
            step = self._progress.position.step if step is None else step
            groups = self._groups
            rank, world_size = groups.rank, groups.world_size
            if name not in HANDING_OVER:
                rank, world_size = groups.rank_that_trains, groups.world_size_that_trains
            self._faults.point(name, step, rank, world_size, groups.generation)
