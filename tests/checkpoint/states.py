"""States to checkpoint, and what the tests do with them again and again."""

import itertools
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from elastic_dp.checkpoint.checkpoint_writer import write_blobs, write_commit
from elastic_dp.checkpoint.commit_record import CommitMetadata
from elastic_dp.checkpoint.exporting import naming_of
from elastic_dp.checkpoint.snapshot import Snapshot
from elastic_dp.storage import Store
from elastic_dp.train.state.train_state import StepRecord, TrainState

_numbers = itertools.count()


def memory_store():
    return Store(f"memory://checkpoints-{next(_numbers)}/run")


class Average:
    """Something that a user gives as `state=`."""

    def __init__(self):
        self.values = OrderedDict(w=torch.zeros(3), seen={1, 2}, best=float("inf"), none=None)

    def state_dict(self):
        return self.values

    def load_state_dict(self, values):
        self.values = values


def train_state(seed=0, width=8):
    """A small model with buffers and tied weights, after one step of AdamW."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, width),
        torch.nn.BatchNorm1d(width),
        torch.nn.Linear(width, 4),
        torch.nn.Linear(4, width),
    )
    model[3].weight = model[0].weight
    model.register_buffer("hidden", torch.arange(3.0), persistent=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3])
    model(torch.randn(5, 4)).square().mean().backward()
    optimizer.step()
    scheduler.step()
    state = TrainState(model, optimizer, scheduler, None, {"average": Average()})
    state.record = StepRecord(1, 0, False, 0.5, 8.0, {"accuracy": float("nan")}, 0.1)
    state.bad_row_groups = {7, 3}
    state.note_commit()
    return state


def big_tree(nbytes, seed=0):
    """`nbytes` in tensors of several dtypes, one of which spans several parts."""
    torch.manual_seed(seed)
    half = nbytes // 2
    return {
        "whole": torch.randint(0, 255, (half,), dtype=torch.uint8),
        "double": torch.randn(half // 16, dtype=torch.float64),
        "last": torch.randn(3, 2, 4, 5).to(memory_format=torch.channels_last),
        "more": [torch.randn(half // 16, dtype=torch.float64), 3, "word"],
    }


def checkpoint(catalog, step, tree, *, workers=1, fence=1, **metadata):
    """Write and commit it as a group of `workers` would, each with its own copy."""
    with ThreadPoolExecutor(4) as executor:
        snapshots = [Snapshot() for _ in range(workers)]
        for snapshot in snapshots:
            snapshot.take(step, tree)
        members = [str(rank) for rank in range(workers)]
        blobs = [
            write_blobs(catalog, snapshot, executor, writer=member, members=members)
            for member, snapshot in zip(members, snapshots, strict=True)
        ]
        return write_commit(catalog, blobs, fence, CommitMetadata(**metadata))


def save(catalog, state, step, **how):
    naming = naming_of(state.model, state.optimizer)
    return checkpoint(catalog, step, state.tree([], None), naming=naming, **how)


def same(one, other):
    """Equal in type, in value and in every bit."""
    tensors = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
    if type(one) is not type(other) and not tensors:  # a parameter comes back as a tensor
        return False
    if tensors:
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            return False
        pair = [t.detach().contiguous().view(-1).view(torch.uint8) for t in (one, other)]
        return torch.equal(*pair)
    if isinstance(one, np.ndarray | np.generic):
        return (one.dtype, one.shape) == (
            other.dtype,
            other.shape,
        ) and one.tobytes() == other.tobytes()
    if isinstance(one, dict):
        keys = zip(one, other, strict=False)
        return len(one) == len(other) and all(
            same(a, b) and same(one[a], other[b]) for a, b in keys
        )
    if isinstance(one, list | tuple) or type(one).__name__ == "deque":
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, complex):
        return same(one.real, other.real) and same(one.imag, other.imag)
    if isinstance(one, float):
        return np.float64(one).tobytes() == np.float64(other).tobytes()
    if hasattr(one, "__dataclass_fields__"):
        return same(vars(one), vars(other))
    return bool(one == other)
