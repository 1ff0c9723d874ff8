"""The model that is sent to workers is on the host."""

import torch

from elastic_dp.integrations.adapter import on_host


def test_copied_code_keeps_the_name_of_its_file():
    """Without it a traceback on a worker shows no source lines."""
    functions = {}
    exec(compile("def act(x): return x", "users_script.py", "exec"), functions)
    model = torch.nn.Linear(2, 2, device="meta")
    model.act = functions["act"]
    model.act.__module__ = "__main__"  # sent by value, as all of a script is
    copy = on_host(model)
    assert copy.act is not model.act
    assert copy.act.__code__.co_filename == "users_script.py"


def test_model_on_the_host_is_sent_as_it_is():
    model = torch.nn.Linear(2, 2)
    assert on_host(model) is model and on_host(None) is None


def test_model_elsewhere_is_copied():
    model = torch.nn.Linear(2, 2, device="meta")
    model.act = lambda x: x  # plain pickle has no function without a name
    assert on_host(model) is not model
