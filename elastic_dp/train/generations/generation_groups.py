"""The process groups of one worker: those of its generation, and older ones that peers may still
use.

The controller may say who the next members will most likely be while this worker is still in the
present generation (`prepare`): their group then forms in the background, and is taken if they are.

A generation has up to two groups: one for state and steps, and one for evaluations, formed when it
is first used. Both end with the generation.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch

from elastic_dp.coordinator.messages import Membership, PrepareGroup, WorkerId
from elastic_dp.device.accelerator import accelerator_of
from elastic_dp.distributed.device_connection import load_kernels
from elastic_dp.distributed.device_transport import DeviceTransport
from elastic_dp.distributed.process_group import (
    GroupFormation,
    ProcessGroup,
    connect_devices,
)
from elastic_dp.distributed.rendezvous import GroupName, Rendezvous
from elastic_dp.threads import background
from elastic_dp.train.generations.worker_control import WorkerControl


@dataclass(frozen=True, slots=True)
class _Prepared:
    command: PrepareGroup
    formation: GroupFormation


class GenerationGroups:
    """The groups of one worker. `main` is set while the worker is inside a generation. `membership`
    stays that of the last one."""

    def __init__(
        self,
        worker: WorkerId,
        device: torch.device,
        control: WorkerControl,
        rendezvous: Rendezvous | None,
        *,
        connects: bool,
    ) -> None:
        """`rendezvous` may be None where the run has one worker. `connects`: the devices of the
        members get a communicator of their own."""
        self._worker, self._device, self._control = worker, device, control
        self._rendezvous, self._connects = rendezvous, connects
        self.main: ProcessGroup | None = None
        self.membership: Membership | None = None  # of the present or the last generation
        self._joining: frozenset[int] = frozenset()
        self._side: ProcessGroup | None = None
        self._old: list[ProcessGroup] = []
        self._prepared: _Prepared | None = None
        self._preparing = threading.Lock()

    @property
    def rank(self) -> int:
        return 0 if self.membership is None else self.membership.rank(self._worker)

    @property
    def world_size(self) -> int:
        return 0 if self.membership is None else len(self.membership.members)

    @property
    def rank_that_trains(self) -> int:
        """The rank among the workers that run micro-batches."""
        return self.rank - sum(other < self.rank for other in self._joining)

    @property
    def world_size_that_trains(self) -> int:
        return self.world_size - len(self._joining)

    @property
    def generation(self) -> int:
        return 0 if self.membership is None else self.membership.generation

    def load_kernels(self) -> None:
        """Prepares, in the background, for the first communicator of this process."""
        if self._connects:
            # Destroying a communicator may block, so the caller's thread has no reference to it.
            background("kernels", lambda: load_kernels(accelerator_of(self._device))).start()

    def prepare(self, command: PrepareGroup) -> None:
        """Starts to form the group of a generation that is to come. Any thread may call it."""
        with self._preparing:
            before = self._prepared
            newest = (before.command.generation, before.command.number) if before else (0, 0)
            if (command.generation, command.number) <= max(newest, (self.generation, 1 << 62)):
                return
            name = GroupName.main(command.generation, command.number, self._process)
            place = command.workers.index(self._worker), len(command.workers)
            formation = self._formation(name, *place, command.forming_timeout_s)
            self._prepared = _Prepared(command, formation.start())
        if before is not None:
            before.formation.abandon()

    def enter(self, membership: Membership) -> None:
        """Makes this the present generation."""
        self.membership, self._joining = membership, frozenset()

    def start(self) -> None:
        """Starts to form the group of all members, or takes what was prepared for this one."""
        membership = self.membership
        assert membership is not None
        number = membership.generation, membership.prepared
        with self._preparing:
            prepared, self._prepared = self._prepared, None
        if prepared is not None:
            if (prepared.command.generation, prepared.command.number) == number:
                self._main_formation = prepared.formation
                self._control.at_end(prepared.formation.abort)
                return
            prepared.formation.abandon()
        name = GroupName.main(*number, self._process)
        self._main_formation = self._started(name, self.rank, self.world_size)

    def formed(self) -> ProcessGroup:
        """Waits for the group, sets `main` and returns it. Raises GroupError."""
        assert self.membership is not None
        self.main = self._main_formation.wait()
        self.main.place(self.membership.topology)
        if self._connects and self._rendezvous is not None:
            connect_devices(self.main, self._rendezvous, self.generation)
        for old in self._old:
            old.close()
        self._old = []
        return self.main

    @property
    def on_device(self) -> DeviceTransport | None:
        """The transport of gradients on a device, within a generation."""
        return None if self.main is None else self.main.on_device

    def auxiliary(self) -> ProcessGroup:
        """Returns a second group of the members that train, for evaluations. Raises GroupError."""
        if self._side is None:
            name = GroupName(self.generation, f"side-{len(self._joining)}", self._process)
            size = self.world_size_that_trains
            self._side = self._started(name, self.rank_that_trains, size).wait()
        return self._side

    def join_gradually(self, ranks: frozenset[int]) -> None:
        """These ranks take the state over while the others train; none: all have it."""
        self._joining = ranks
        self._old += [group for group in (self._side,) if group is not None]
        self._side = None

    def leave(self) -> None:
        """Leaves the generation. Its groups close later. Peers may still be receiving what this
        worker sent for the step that all committed."""
        if self.on_device is not None:
            self.on_device.come_to_rest()
        self._old += [group for group in (self.main, self._side) if group is not None]
        self.main = self._side = None

    def _started(self, name: GroupName, rank: int, world_size: int) -> GroupFormation:
        assert self.membership is not None
        formation = self._formation(name, rank, world_size, self.membership.forming_timeout_s)
        self._control.at_end(formation.abort)
        return formation.start()

    def _formation(
        self, name: GroupName, rank: int, world_size: int, timeout_s: float
    ) -> GroupFormation:
        return GroupFormation(
            self._rendezvous,
            name,
            rank=rank,
            world_size=world_size,
            device=self._device,
            timeout_s=timeout_s,
        )

    @property
    def _process(self) -> int:
        return 0 if self._rendezvous is None else self._rendezvous.process
