"""Reads the newest checkpoint with all members of a generation: each reads a share and sends it.

- Only rank 0 lists and reads commit records and chooses the checkpoint, so all members restore the
  same one.
- Each byte is read from the store once, whatever the number of members.
- The members exchange bytes only after each has reported that its share is intact, into memory that
  does not hold state yet. If one share is damaged, all members go back to the previous checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from elastic_dp.checkpoint.catalog import Catalog
from elastic_dp.checkpoint.checkpoint_reader import newest_first, read_own_range
from elastic_dp.checkpoint.commit_record import CommitRecord
from elastic_dp.distributed.process_group import ProcessGroup
from elastic_dp.distributed.tensor_broadcast import exchange_spans, pack_payload, receive, send
from elastic_dp.errors import CheckpointDamaged


def read_collectively(
    catalog: Catalog,
    group: ProcessGroup,
    *,
    enters: Callable[[str], None],
    damaged: Callable[[CheckpointDamaged], None],
) -> tuple[CommitRecord, torch.Tensor]:
    """Returns the commit record and its line of bytes on the host, the same on all members of
    `group`.

    Each member calls `enters` with "restore" before it reads, which may take as long as the store
    needs, and with "receive" when it waits only for peers. Rank 0 calls `damaged` for each
    checkpoint that is skipped. Raises CheckpointError if all checkpoints are damaged.
    """
    commits = newest_first(catalog, damaged)
    while True:
        enters("restore")
        commit = _of_all(group, next(commits) if group.rank == 0 else None)
        line = torch.empty(commit.nbytes, dtype=torch.uint8)
        wrong = _read(catalog, commit, group, line)
        enters("receive")
        reasons = [told.decode() for told in group.gather_bytes(wrong.encode()) if told]
        if not reasons:
            layout, size = commit.manifest.layout, group.world_size
            if size > 1:
                exchange_spans(
                    group, line, [layout.span(layout.share(r, size)) for r in range(size)]
                )
            return commit, line
        if group.rank == 0:
            damaged(CheckpointDamaged(commit.step, "; ".join(dict.fromkeys(reasons))))


def _of_all(group: ProcessGroup, commit: CommitRecord | None) -> CommitRecord:
    """Returns the commit record of rank 0 on all members."""
    if group.world_size == 1:
        assert commit is not None
        return commit
    if group.rank == 0:
        assert commit is not None
        send(group, pack_payload(commit.step.to_bytes(8, "little") + commit.to_bytes()))
        return commit
    given, _ = receive(group, torch.device("cpu"))
    return CommitRecord.from_bytes(given[8:], int.from_bytes(given[:8], "little"))


def _read(catalog: Catalog, commit: CommitRecord, group: ProcessGroup, line: torch.Tensor) -> str:
    """Reads this member's share of the line. Returns what is wrong with it, or an empty text."""
    try:
        read_own_range(catalog, commit, group.rank, group.world_size, line)
    except CheckpointDamaged as error:
        return error.reason
    return ""
