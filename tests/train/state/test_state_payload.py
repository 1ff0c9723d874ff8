"""State between workers: every bit of it comes, to its place in one copy, and nothing that comes
names code to run."""

import pickle

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from elastic_dp.checkpoint.catalog import Catalog
from elastic_dp.checkpoint.checkpoint_reader import device_types, load
from elastic_dp.checkpoint.layout import flat_bytes
from elastic_dp.errors import CollectiveFailed, StateError
from elastic_dp.train.state.state_moves import units_of
from elastic_dp.train.state.state_payload import StatePayload, from_vector, rehome_state, to_vectors
from tests.checkpoint.states import memory_store, same, save, train_state
from tests.checkpoint.test_codec import TREE

DEVICE = torch.device("meta")  # nothing can be copied from it


class Copies(TorchDispatchMode):
    """What is copied, by the number of bytes."""

    def __init__(self):
        super().__init__()
        self.nbytes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default):
            self.nbytes.append(args[0].numel() * args[0].element_size())
        return func(*args, **(kwargs or {}))


def test_restored_tensors_of_a_device_are_copied_there_once_and_parameters_into_their_own():
    catalog, given, own = Catalog(memory_store()), train_state(), train_state(seed=1)
    commit = save(catalog, given, 7)
    tree = load(catalog, commit)
    assert set(device_types(commit).values()) == {"cpu"}
    places = dict.fromkeys(device_types(commit), "cuda")
    with Copies() as copies:
        made = rehome_state(tree, DEVICE, own.own_tensors, places)
    specs = commit.manifest.specs.values()
    assert sorted(copies.nbytes) == sorted(spec.nbytes for spec in specs)
    parameters = list(own.parameters.values())
    for mine, there, theirs in zip(
        made["step"]["parameters"], parameters, given.parameters.values(), strict=True
    ):
        assert mine.data_ptr() == there.data_ptr() and torch.equal(mine, theirs)
    moments = [
        value
        for values in made["step"]["optimizer"]
        for value in values.values()
        if isinstance(value, torch.Tensor)
    ]
    assert moments and all(value.device == DEVICE for value in moments)


def sent(tree, targets=None):
    """What another worker has of a tree that it receives."""
    given = StatePayload.of(tree)
    taken = StatePayload.receive(given.text, torch.device("cpu"), targets)
    units = (units_of(*map(flat_bytes, one.tensors)) for one in (taken, given))
    for mine, theirs in zip(*units, strict=True):
        mine.write(torch.cat(list(theirs.read())))
    return taken.tree()


@pytest.mark.parametrize(
    "pass_on", [sent, lambda t: from_vector(torch.cat(to_vectors(t)), torch.device("cpu"))]
)
def test_every_kind_of_value_comes_in_every_bit(pass_on):
    nan = torch.tensor([0x7FC12345, -0x7FFFFFFF], dtype=torch.int32).view(torch.float32)
    tree = pass_on(TREE | {"nan": nan})
    assert all(same(value, tree[key]) for key, value in TREE.items())
    assert tree["nan"].view(torch.int32).equal(nan.view(torch.int32))


def test_tensors_arrive_where_they_are_to_be():
    mine = torch.zeros(3)
    tree = {"a": torch.ones(3), "b": torch.ones(2)}
    got = sent(tree, lambda encoded, specs: {encoded["a"]["v"]: mine})
    assert got["a"].data_ptr() == mine.data_ptr() and mine.tolist() == [1, 1, 1]


class Runs:
    """What a pickle may do."""

    ran = False

    def __reduce__(self):
        return setattr, (Runs, "ran", True)


def test_code_is_neither_sent_nor_run():
    with pytest.raises(StateError, match="Runs"):
        StatePayload.of({"x": Runs()})
    for foreign in (pickle.dumps(Runs()), b'[{}, [["x", "load", [1], null, "cpu"]]]'):
        with pytest.raises(CollectiveFailed, match=r"no state"):
            StatePayload.receive(foreign, torch.device("cpu"), None)
    assert not Runs.ran
