"""State between members: every bit of it comes, and nothing that comes names code to run."""

import json
import pickle
import threading

import pytest
import torch

from elastic_dp.distributed import tensor_broadcast
from elastic_dp.errors import CollectiveFailed, StateError
from elastic_dp.train.state import state_payload
from tests.checkpoint.states import same
from tests.checkpoint.test_codec import TREE
from tests.distributed.meeting import InMemory, form
from tests.patience import PATIENCE_S

SECRET = b"secret"


class Alone:
    """A group whose one other member reads what the first one sends: in the order of the
    broadcasts."""

    home = torch.device("cpu")

    def __init__(self):
        self.sent = []

    def broadcast(self, tensor, root):
        if self.sent is not None and self.sending:
            self.sent.append(tensor.clone())
        else:
            tensor.copy_(self.sent.pop(0))

    def wait(self, operation):
        pass

    def synchronize(self):
        pass


def there(payload, receive):
    group = Alone()
    group.sending = True
    tensor_broadcast.send(group, payload)
    group.sending = False
    return receive(group)


def test_every_kind_of_value_comes_in_every_bit():
    def receive(group):
        return state_payload.receive_state(group, torch.device("cpu"))

    tree, _ = there(state_payload.serialize_state(TREE), receive)
    for key, value in TREE.items():
        assert same(value, tree[key]), key
    nan = torch.tensor([0x7FC12345, -0x7FFFFFFF], dtype=torch.int32).view(torch.float32)
    tree, nbytes = there(state_payload.serialize_state({"x": nan, "text": "é" * 100_000}), receive)
    assert tree["x"].view(torch.int32).tolist() == nan.view(torch.int32).tolist() and nbytes == 8
    assert tree["text"] == "é" * 100_000  # longer than the first broadcast


def test_tensors_arrive_where_they_are_to_be():
    mine = torch.zeros(3)
    tree = {"a": torch.ones(3), "b": torch.ones(2)}

    def receive(group):
        return state_payload.receive_state(
            group, torch.device("cpu"), lambda encoded, specs: {encoded["a"]["v"]: mine}
        )

    got, _ = there(state_payload.serialize_state(tree), receive)
    assert got["a"].data_ptr() == mine.data_ptr() and mine.tolist() == [1, 1, 1]


class Runs:
    """What a pickle may do."""

    ran = False

    def __reduce__(self):
        return setattr, (Runs, "ran", True)


def test_code_is_neither_sent_nor_run():
    """State travelled as a pickle, so whoever joined a group could run code in each member."""
    with pytest.raises(StateError, match="Runs"):
        state_payload.serialize_state({"x": Runs()})
    foreign = tensor_broadcast.pack_payload(pickle.dumps(Runs()))
    with pytest.raises(ValueError, match=r"codec|Expecting"):
        there(foreign, lambda group: state_payload.receive_state(group, torch.device("cpu")))
    assert not Runs.ran


def test_tensor_of_an_unknown_kind_is_refused():
    with pytest.raises(CollectiveFailed, match="'load'"):
        tensor_broadcast._specs_from_json(json.dumps([[["load", [1], [1], "cpu"]], [0]]).encode())


def test_state_goes_through_a_real_group():
    meet, found = InMemory(), {}

    def member(rank):
        group = form(meet, rank, 2)
        if rank == 0:
            tensor_broadcast.send(
                group, state_payload.serialize_state({"w": torch.arange(400_000.0), "n": 2**70})
            )
        else:
            found["tree"], _ = state_payload.receive_state(group, torch.device("cpu"))
        group.wait(group.all_reduce(torch.ones(1)))
        group.close()

    threads = [threading.Thread(target=member, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert found["tree"]["n"] == 2**70 and found["tree"]["w"].equal(torch.arange(400_000.0))
