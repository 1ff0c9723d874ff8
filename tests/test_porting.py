"""docs/porting.md: both sides of its diff run, and give the same weights over the same rows."""

import re
from pathlib import Path

import torch

PAGE = (Path(__file__).parents[1] / "docs/porting.md").read_text()


class Lines(torch.utils.data.Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, i):
        x = torch.randn(8, generator=torch.Generator().manual_seed(i))
        return {"x": x, "y": x[:1] - x[1:2]}


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
