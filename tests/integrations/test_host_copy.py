"""What is sent to workers is on the host; an optimizer keeps its model."""

import torch

from elastic_dp.integrations.adapter import copied_to_host, on_host


def test_copies_refer_to_each_other_and_not_to_the_originals():
    model = torch.nn.Linear(2, 2)
    model.act = lambda x: x  # plain pickle has no function without a name
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    copy, its_optimizer, its_scheduler = copied_to_host(model, optimizer, scheduler)
    assert its_optimizer.param_groups[0]["params"][0] is copy.weight is not model.weight
    assert its_scheduler.optimizer is its_optimizer
    assert torch.equal(copy.weight, model.weight) and copy.weight.device.type == "cpu"


def test_copied_code_keeps_the_name_of_its_file():
    """Without it a traceback on a worker shows no source lines."""
    functions = {}
    exec(compile("def act(x): return x", "users_script.py", "exec"), functions)
    model = torch.nn.Linear(2, 2)
    model.act = functions["act"]
    model.act.__module__ = "__main__"  # sent by value, as all of a script is
    [copy] = copied_to_host(model)
    assert copy.act is not model.act
    assert copy.act.__code__.co_filename == "users_script.py"


def test_model_on_the_host_is_sent_as_it_is():
    model = torch.nn.Linear(2, 2)
    assert on_host(model, None) == (model, None) and on_host(None) == (None,)


def test_model_elsewhere_is_copied():
    model = torch.nn.Linear(2, 2, device="meta")
    copy, held = on_host(model, [model])
    assert copy is not model and held[0] is copy
