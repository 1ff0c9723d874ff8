"""Who holds the optimizer's state. An extension divides it among the members."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elastic_dp.checkpoint.commit_record import Manifest
    from elastic_dp.checkpoint.snapshot import HeldState
    from elastic_dp.distributed.process_group import ProcessGroup
    from elastic_dp.train.checkpointing.collective_read import Ranges, ReadCheckpoint


class OptimizerHolders:
    """Each member holds all of it, in the user's optimizer."""

    is_divided = False

    @property
    def has_all(self) -> bool:
        """Whether this member holds everything."""
        return True

    def lacks_copies(self, generation: int) -> bool:
        """Whether some part may have one holder since `generation`, which this member has left."""
        return False

    def open(
        self,
        group: ProcessGroup,
        generation: int,
        topology: Sequence[Sequence[int]],
        *,
        at_once: bool = False,
    ) -> int:
        """Gives each member what it is to hold in this generation. Returns the number of bytes
        received. `at_once`: before the first step. Raises PiecesLost and GroupError."""
        return 0

    def close(self) -> None:
        """Leaves the generation."""

    # ------------------------------------------------------------------------ state transfers

    def tree(self) -> dict[str, Any]:
        """Returns what another member must know of the last step to take it over."""
        return {}

    def take_over(self, step: Mapping[str, Any], *, joins: bool) -> None:
        """Goes to the step of this tree, before parameters and groups do."""

    def adopted(self, step: Mapping[str, Any], *, joins: bool) -> None:
        """Parameters and groups are those of this tree now."""

    # ---------------------------------------------------------------------------- checkpoints

    def to_write(self, worker: str, members: Sequence[str]) -> HeldState | None:
        """Returns the parts that `worker` holds. `members` are those of the generation in which it
        got them, by rank. None: all members hold everything."""
        return None

    def needs(
        self, manifest: Manifest, world_size: int, topology: Sequence[Sequence[int]]
    ) -> list[Ranges] | None:
        """Returns what each rank of a generation needs of a checkpoint. None: everything."""
        return None

    def common(self, manifest: Manifest) -> Manifest:
        """Returns the description of what each member needs of a checkpoint."""
        return manifest

    def restore(
        self,
        read: ReadCheckpoint,
        places: Mapping[str, str],
        rank: int,
        world_size: int,
        topology: Sequence[Sequence[int]],
    ) -> None:
        """Holds what it is to hold of a checkpoint, whose other state is restored already.
        `places`: the type of the device on which each tensor belongs, by its name."""
