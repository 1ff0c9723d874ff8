"""A state whose optimizer's part is divided among workers, and its checkpoints."""

import copy
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch

from elastic_dp.checkpoint.checkpoint_writer import write_blobs, write_commit
from elastic_dp.checkpoint.commit_record import CommitMetadata
from elastic_dp.checkpoint.exporting import naming_of
from elastic_dp.checkpoint.snapshot import HeldPiece, HeldState, Snapshot

UNIT = 10  # elements


def whole_state(seed=0, *, shapes=((7, 5), (3,), (), (4, 1, 6)), dtype=torch.float32):
    """What a run has whose optimizer is not sharded. The last parameter's state is not divided,
    and the first one's memory is not in the order of its elements."""
    torch.manual_seed(seed)

    def like(shape):
        made = torch.randn(shape).to(dtype)
        return made.t().contiguous().t() if len(shape) == 2 else made

    states = [
        {"step": torch.tensor(float(seed)), "exp_avg": like(s), "exp_avg_sq": like(s), "none": None}
        for s in shapes
    ]
    states.append({"row": torch.randn(3, 1), "bits": torch.ones(3, dtype=torch.bool), "lr": 0.1})
    return {
        "step": {"optimizer": states, "parameters": [torch.randn(s) for s in shapes]},
        "body": {"hyper": [{"lr": 0.5}], "user": {}},
    }


def without_pieces(tree):
    tree = copy.deepcopy(tree)
    tree["step"]["optimizer"] = [{} for _ in tree["step"]["optimizer"]]
    return tree


def pieces_of(tree, size=UNIT):
    """All pieces of the optimizer's state, without holders."""
    found = []
    for number, state in enumerate(tree["step"]["optimizer"]):
        shape = state["exp_avg"].shape if "exp_avg" in state else ()
        if not shape:
            found.append(HeldPiece(number, 0, 1, state, ()))
            continue
        numel, stride = shape.numel(), state["exp_avg"].stride()
        for first in range(0, numel, size):
            last = min(first + size, numel)
            part = {
                key: x.as_strided((numel,), (1,))[first:last]
                if isinstance(x, torch.Tensor) and x.dim()
                else x
                for key, x in state.items()
            }
            found.append(HeldPiece(number, first, last, part, (), tuple(shape), stride))
    return found


def held_by_two(count, workers):
    """Two workers for each piece, or one of one."""
    if workers == 1:
        return [(0,)] * count
    turns = (divmod(number, workers) for number in range(count))
    return [(rank, (rank + 1 + turn % (workers - 1)) % workers) for turn, rank in turns]


def held_by(rank, tree, holders, size=UNIT):
    pieces = pieces_of(tree, size)
    mine = [
        replace(piece, holders=tuple(map(str, ranks)))
        for piece, ranks in zip(pieces, holders, strict=True)
        if rank in ranks
    ]
    return HeldState(len(tree["step"]["optimizer"]), mine)


def write_sharded(catalog, step, tree, *, workers=3, lost=(), holders=None, unit=UNIT):
    """Each worker writes its blobs; for those that are `lost` others do. Returns what a committer
    is told, by worker."""
    holders = holders or held_by_two(len(pieces_of(tree, unit)), workers)
    reports, members = {}, [str(rank) for rank in range(workers)]
    with ThreadPoolExecutor(4) as executor:
        for rank, writer in enumerate(members):
            if rank in lost:
                continue
            snapshot = Snapshot()
            snapshot.take(step, without_pieces(tree), held_by(rank, tree, holders, unit))
            how = {"writer": writer, "members": members}
            planned = write_blobs(catalog, snapshot, executor, **how, names=()).planned
            mine = {n for n, by in planned.items() if by == writer or int(by) in lost}
            reports[writer] = write_blobs(catalog, snapshot, executor, **how, names=mine)
    return reports


def sharded_checkpoint(catalog, step, tree, *, fence=1, naming=None, metrics=None, **how):
    reports = write_sharded(catalog, step, tree, **how)
    metadata = CommitMetadata(naming=naming or {}, metrics=metrics or {})
    return write_commit(catalog, list(reports.values()), fence, metadata)


def save_sharded(catalog, state, step, **how):
    """Write and commit a state as `save` of `states.py` does, with a sharded optimizer."""
    naming = naming_of(state.model, state.optimizer)
    return sharded_checkpoint(catalog, step, state.tree([], None), naming=naming, **how)
