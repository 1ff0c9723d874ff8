"""A restored state goes from the bytes that were read to its place in one copy."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from elastic_dp.checkpoint.catalog import Catalog
from elastic_dp.checkpoint.checkpoint_reader import device_types, read_own_range, whole_tree
from elastic_dp.train.state.state_payload import rehome_state
from tests.checkpoint.states import memory_store, save, train_state

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
    line = torch.empty(commit.nbytes, dtype=torch.uint8)
    read_own_range(catalog, commit, 0, 1, line)
    assert set(device_types(commit).values()) == {"cpu"}
    places = dict.fromkeys(device_types(commit), "cuda")
    with Copies() as copies:
        tree = whole_tree(commit, line)
        made = rehome_state(tree, DEVICE, own.own_tensors, places)
    specs = commit.manifest.layout.specs
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
