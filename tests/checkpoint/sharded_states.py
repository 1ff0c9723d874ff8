"""A state whose optimizer's part is divided among workers, and its checkpoints."""

import copy
from concurrent.futures import ThreadPoolExecutor

import torch

from elastic_dp.checkpoint.checkpoint_writer import write_blobs, write_commit
from elastic_dp.checkpoint.commit_record import CommitMetadata
from elastic_dp.checkpoint.snapshot import HeldUnit, Snapshot, UnitGroup, UnitSnapshot
from elastic_dp.checkpoint.state_dict_names import naming_of
from elastic_dp.checkpoint.state_units import UnitPlace

UNIT = 10  # elements


def whole_state(seed=0, *, shapes=((7, 5), (3,), (), (4, 1, 6)), dtype=torch.float32):
    """What a run has whose optimizer is not sharded. The last parameter's state is none of a unit,
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


def without_units(tree):
    tree = copy.deepcopy(tree)
    tree["step"]["optimizer"] = [{} for _ in tree["step"]["optimizer"]]
    return tree


def units_of(tree, unit=UNIT):
    """All units of the optimizer's state."""
    found = []
    for number, state in enumerate(tree["step"]["optimizer"]):
        shape = state["exp_avg"].shape if "exp_avg" in state else ()
        if not shape:
            found.append(HeldUnit(UnitPlace(number, 0, 1), state))
            continue
        size, stride = shape.numel(), state["exp_avg"].stride()
        for first in range(0, size, unit):
            last = min(first + unit, size)
            part = {
                key: x.as_strided((size,), (1,))[first:last]
                if isinstance(x, torch.Tensor) and x.dim()
                else x
                for key, x in state.items()
            }
            found.append(HeldUnit(UnitPlace(number, first, last), part, tuple(shape), stride))
    return found


def held_by_two(count, workers):
    """Two workers for each unit, or one of one."""
    if workers == 1:
        return [(0,)] * count
    turns = (divmod(number, workers) for number in range(count))
    return [(rank, (rank + 1 + turn % (workers - 1)) % workers) for turn, rank in turns]


def groups_of(rank, units, holders):
    by_pair = {}
    for unit, ranks in zip(units, holders, strict=True):
        if rank in ranks:
            by_pair.setdefault(ranks, []).append(unit)
    return [UnitGroup(str(ranks[0]), mine) for ranks, mine in by_pair.items()]


def write_sharded(catalog, step, tree, *, workers=3, lost=(), holders=None, unit=UNIT):
    """Each worker writes its blobs; for those that are `lost` others do. Returns what a committer
    is told: the manifest, and by worker its blobs."""
    units = units_of(tree, unit)
    holders = holders or held_by_two(len(units), workers)
    rest, reports = without_units(tree), {}
    members = [str(rank) for rank in range(workers)]
    with ThreadPoolExecutor(4) as executor:
        for rank, writer in enumerate(members):
            if rank in lost:
                continue
            snapshot, own = Snapshot(), UnitSnapshot()
            snapshot.take(step, rest)
            own.take(len(units), groups_of(rank, units, holders))
            how = {"writer": writer, "members": members, "units": own}
            planned = write_blobs(catalog, snapshot, executor, **how, names=()).planned
            mine = {n for n, by in planned.items() if by == writer or int(by) in lost}
            reports[writer] = write_blobs(catalog, snapshot, executor, **how, names=mine)
    return snapshot.manifest(), reports


def sharded_checkpoint(catalog, step, tree, *, fence=1, naming=None, metrics=None, **how):
    manifest, reports = write_sharded(catalog, step, tree, **how)
    metadata = CommitMetadata(naming=naming or {}, metrics=metrics or {})
    return write_commit(catalog, manifest, list(reports.values()), fence, metadata)


def save_sharded(catalog, state, step, **how):
    """Write and commit a state as `save` of `states.py` does, with a sharded optimizer."""
    naming = naming_of(state.model, state.optimizer)
    return sharded_checkpoint(catalog, step, state.tree([], None), naming=naming, **how)
