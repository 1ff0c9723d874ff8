"""docs/porting.md: both sides of its diff run, and give the same weights over the same rows."""

import re
from functools import partial
from pathlib import Path

import torch
from torch.optim.swa_utils import AveragedModel

import elastic_dp as edp

PAGE = (Path(__file__).parents[1] / "docs/porting.md").read_text()


class Lines(torch.utils.data.Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, i):
        x = torch.randn(8, generator=torch.Generator().manual_seed(i))
        return {"x": x, "y": x[:1] - x[1:2]}


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(8, 1)

    def forward(self, x):
        return self.inner(x)


def make_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))


def weights(sign, folder, monkeypatch):
    (diff,) = re.findall("```diff\n(.*?)```", PAGE, re.S)
    other = {"-": "+", "+": "-"}[sign]
    script = "\n".join(line[1:] for line in diff.splitlines() if not line.startswith(other))
    script = script.replace("DistributedSampler(rows)", "DistributedSampler(rows, shuffle=False)")
    script = script.replace("epochs=3", "epochs=3, shuffle=False")
    script = script.replace(
        'name="mine").fit()', 'storage_path="runs", name="mine").fit(local=True)'
    )
    folder.mkdir()
    monkeypatch.chdir(folder)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "0")
    exec(script, {"__name__": "__main__", "rows": Lines(), "make_model": make_model})
    return torch.load(folder / "model.pt")


def test_both_sides_of_the_page_give_the_same_weights(tmp_path, monkeypatch):
    before = weights("-", tmp_path / "before", monkeypatch)
    after = weights("+", tmp_path / "after", monkeypatch)
    assert [*before] == [*after]
    for name, value in before.items():
        torch.testing.assert_close(after[name], value, rtol=1e-5, atol=1e-6)
        assert not torch.equal(value, make_model().state_dict()[name])


def test_rows_about_checkpoints_and_compiled_models_hold(tmp_path):
    data, score = edp.MapStyleData(Lines(), micro_batch_size=10), "eval_loss"
    counted, losses = [], []

    def backend(graph, inputs):
        counted.append(graph)
        return graph.forward

    def loss_fn(model, batch):
        return torch.nn.functional.mse_loss(model(batch["x"]), batch["y"])

    def train(ctx, rate):
        model = Net()
        model.compile(backend=backend)
        ema = AveragedModel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        for step in ctx.steps(model, optimizer, loss_fn, state={"ema": ema}):
            ema.update_parameters(model)
            if step.epoch_end:
                losses.append(ctx.evaluate(loss_fn, data))
                ctx.checkpoint(losses[-1])
                optimizer.param_groups[0]["lr"] = 3.0  # from here on it gets worse

    keep = {"num_to_keep": 1, "checkpoint_score_attribute": score, "checkpoint_score_order": "min"}
    result = edp.ElasticTrainer(
        partial(train, rate=0.1),
        name="mine",
        storage_path=str(tmp_path),
        data=edp.MapStyleData(Lines(), micro_batch_size=4, epochs=3),
        scaling=edp.ScalingConfig(max_workers=2, virtual_workers=2),
        checkpoint=edp.CheckpointConfig(**keep),
    ).fit(local=True)
    best = edp.load_state(result.path, "best", metric=score, order="min")
    last = result.load_state()
    assert (best.step, last.step) == (6, 18) and counted
    assert best.metrics[score] == min(one[score] for one in losses)
    assert [*best.model] == [*last.model] == [*Net().state_dict()]
    AveragedModel(Net()).load_state_dict(last.user["ema"])
