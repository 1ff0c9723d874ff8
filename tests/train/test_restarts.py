"""What a script that is run again may change, and how its weights get out."""

import signal
import threading

import pytest
import torch
from torch.optim.lr_scheduler import OneCycleLR
from torch.optim.swa_utils import AveragedModel

from elastic_dp.errors import LoopError, RunMismatch, SpecError
from tests.runs import fit, local, spec_of
from tests.train.jobs import classifier, cross_entropy, loop


def in_order(reverse, *, named=False):
    """Groups whose parameters are reversed, as those of a set may be in another process."""

    def train(ctx):
        model = classifier()
        for_norm = [(n, p) for n, p in model.named_parameters() if n.endswith("weight")]
        others = [(n, p) for n, p in model.named_parameters() if not n.endswith("weight")]
        groups = [
            {"params": [pair if named else pair[1] for pair in pairs[:: -1 if reverse else 1]]}
            for pairs in (for_norm, others)
        ]
        groups[0]["weight_decay"] = 0.1
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        for _ in ctx.steps(model, optimizer, cross_entropy):
            for group in optimizer.param_groups:
                names = [n for p in group["params"] for n, q in model.named_parameters() if p is q]
                assert group.get("param_names", names) == names

    return train


@pytest.mark.filterwarnings("ignore:since the last start of this run")  # the order is code
@pytest.mark.parametrize("named", [False, True], ids=["parameters", "named"])
def test_groups_in_another_order_of_parameters_are_those_of_the_run(named, tmp_path):
    whole = fit(in_order(False, named=named), tmp_path / "whole", 8)
    fit(in_order(False, named=named), tmp_path / "cut", 4)
    again = fit(in_order(True, named=named), tmp_path / "cut", 8)
    assert again.weights_sha256 == whole.weights_sha256


def one_cycle(steps):
    def train(ctx):
        model = classifier()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = OneCycleLR(optimizer, 0.1, total_steps=steps or ctx.total_steps)
        loop(ctx, model, optimizer, scheduler=scheduler)

    return train


def test_schedule_that_ends_before_the_run_is_refused_with_a_way_out(tmp_path):
    with pytest.raises(SpecError, match=r"total_steps=4, and the run has 6: .*ctx.total_steps"):
        fit(one_cycle(4), tmp_path / "new", 6)
    first = fit(one_cycle(None), tmp_path, 4)
    with pytest.raises(RunMismatch, match="set max_steps=4"):
        fit(one_cycle(None), tmp_path, 6)
    assert fit(one_cycle(None), tmp_path, 4).weights_sha256 == first.weights_sha256


def test_weights_of_an_average_get_out_by_their_key(tmp_path):
    kept = []

    def train(ctx):
        model = classifier()
        ema = AveragedModel(model)
        kept.append(ema)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in ctx.steps(model, optimizer, cross_entropy, state={"ema": ema}):
            ema.update_parameters(model)

    result = fit(train, tmp_path, 3)
    ema = AveragedModel(classifier())
    ema.load_state_dict(result.load_state().state["ema"])
    for mine, theirs in zip(ema.module.parameters(), kept[0].module.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def sets_a_handler(ctx):
    before = signal.signal(signal.SIGUSR1, lambda number, frame: None)
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        loop(ctx, model, optimizer)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_signal_handler_in_the_train_function_is_refused_with_a_way_out(tmp_path):
    with pytest.raises(LoopError, match="set handlers in the script that calls fit"):
        fit(sets_a_handler, tmp_path, 1)
    failures = []

    def in_a_thread():  # as in a worker
        try:
            local(spec_of(steps=1, workers=1), sets_a_handler)
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=in_a_thread)
    thread.start()
    thread.join()
    assert type(failures[0]) is LoopError
    assert "set handlers in the script that calls fit()" in str(failures[0])
