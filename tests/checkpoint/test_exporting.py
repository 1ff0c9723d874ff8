"""Files that open without this package, the other checkpoints of torch, and warm starts."""

import json
import subprocess
import sys

import pytest
import safetensors.torch
import torch
from typer.testing import CliRunner

from elastic_dp.checkpoint.catalog import Catalog
from elastic_dp.checkpoint.exporting import load_state
from elastic_dp.checkpoint.exporting import safetensors as as_safetensors
from elastic_dp.cli import app
from elastic_dp.errors import CheckpointDamaged, CheckpointError
from elastic_dp.storage import Store
from elastic_dp.train.state.train_state import TrainState
from tests.checkpoint.sharded_states import save_sharded
from tests.checkpoint.states import big_tree, same, save, train_state

runner = CliRunner()


@pytest.fixture(scope="module", params=[save, save_sharded], ids=["replicated", "sharded"])
def run(tmp_path_factory, request):
    """A run's folder with two checkpoints."""
    folder = tmp_path_factory.mktemp("run")
    catalog = Catalog(Store(str(folder)))
    catalog.claim(1, None)
    for step in (10, 20):
        metrics = {"accuracy": 1.0 / step}
        request.param(catalog, train_state(step), step, metrics=metrics, workers=2)
    return folder


def invoke(*words):
    return runner.invoke(app, ["checkpoints", *map(str, words)])


def test_export_writes_safetensors(run, tmp_path):
    told = invoke("export", run, tmp_path / "model.safetensors", "--json").stdout
    assert json.loads(told) == {"step": 20, "destination": str(tmp_path / "model.safetensors")}
    opened = safetensors.torch.load_file(tmp_path / "model.safetensors")
    model = train_state(20).model.state_dict()
    assert opened.keys() == model.keys() and all(same(opened[key], model[key]) for key in model)
    assert "hidden" not in opened and same(opened["3.weight"], opened["0.weight"])


@pytest.mark.parametrize("tensors", [{}, {"e": torch.empty(0)}, big_tree(2000)["last"]])
def test_any_tensors_make_a_file(tensors):
    tensors = tensors if isinstance(tensors, dict) else {"x": tensors, "b": torch.tensor(True)}
    opened = safetensors.torch.load(as_safetensors(tensors))
    assert opened.keys() == tensors.keys() and all(
        same(opened[key], tensors[key]) for key in opened
    )


def test_a_file_of_torch_opens_without_this_package(run, tmp_path):
    assert invoke("export", run, tmp_path / "all.pt", "--step", 10).exit_code == 0
    code = (
        f"import torch, sys\nfound = torch.load({str(tmp_path / 'all.pt')!r}, weights_only=True)\n"
        "assert found['step'] == 10 and 'elastic_dp' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd="/")
    found = torch.load(tmp_path / "all.pt", weights_only=True)
    there, here = train_state(10), train_state(3)
    here.model.load_state_dict(found["model"])
    here.optimizer.load_state_dict(found["optimizer"])
    here.scheduler.load_state_dict(found["scheduler"])
    here.user["average"].load_state_dict(found["user"]["average"])
    assert same(here.optimizer.state_dict(), there.optimizer.state_dict())
    assert same(here.model.state_dict(), there.model.state_dict())
    assert same(here.user["average"].values, there.user["average"].values)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_a_distributed_checkpoint_has_the_same_state(run, tmp_path):
    import torch.distributed.checkpoint as dcp

    for _ in range(2):  # the second one takes the place of the first
        assert invoke("export", run, tmp_path / "dcp").exit_code == 0
    model = train_state(20).model.state_dict()
    found = {"model": {key: torch.zeros_like(value) for key, value in model.items()}, "step": 0}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(found, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert found["step"] == 20
    assert all(same(found["model"][key], model[key]) for key in model)


def test_load_state_finds_the_newest_a_step_and_the_best(run):
    newest = load_state(str(run))
    assert newest.step == 20 and newest.damaged == () and newest.metrics == {"accuracy": 0.05}
    train_state(1).model.load_state_dict(newest.model)
    assert load_state(str(run), 10).step == 10
    assert load_state(str(run), "best", metric="accuracy").step == 10
    assert load_state(str(run), "best", metric="accuracy", order="min").step == 20
    with pytest.raises(CheckpointError, match="it has: 10, 20"):
        load_state(str(run), 15)


@pytest.mark.parametrize("destination", ["model.onnx", ""])
def test_an_ending_that_means_nothing(destination, run, tmp_path):
    result = invoke("export", run, destination and tmp_path / destination)
    assert result.exit_code == 2 and "must end in .safetensors or .pt" in result.stderr


def test_list_and_verify(run):
    listed = invoke("list", run)
    assert listed.exit_code == 0 and "accuracy=0.1" in listed.stdout and "20" in listed.stdout
    assert '"step": 10' in invoke("list", run, "--json").stdout
    verified = invoke("list", run, "--verify")
    assert verified.exit_code == 0 and verified.stdout.count("intact") == 2


def test_damage_is_told_and_skipped(tmp_path):
    catalog = Catalog(Store(str(tmp_path)))
    for step in (1, 2):
        save(catalog, train_state(step), step)
    (part,) = (tmp_path / "checkpoints" / "step-000000000002").rglob("*.safetensors")
    content = bytearray(part.read_bytes())
    content[-1] ^= 1
    part.write_bytes(content)
    result = invoke("list", tmp_path, "--verify")
    assert result.exit_code == 1 and "step 2: " in result.stdout and part.name in result.stdout
    loaded = load_state(str(tmp_path))
    assert loaded.step == 1 and "step 2 is damaged" in loaded.damaged[0]
    with pytest.raises(CheckpointDamaged):
        load_state(str(tmp_path), 2)
    part.unlink()
    assert "is missing" in invoke("list", tmp_path).stdout


def test_verbs_without_a_committed_checkpoint_say_so(tmp_path):
    for words in (["list", tmp_path, "--verify"], ["export", tmp_path, tmp_path / "x.pt"]):
        result = invoke(*words)
        assert result.exit_code == 2 and "no committed checkpoint" in result.stderr
    assert "no committed" in invoke("list", tmp_path).stdout


class Counting(torch.nn.Linear):
    """With state beside its tensors."""

    uses: object = 3

    def get_extra_state(self):
        return {"uses": self.uses, "table": torch.arange(3.0), "past": [(1, b"x")]}

    def set_extra_state(self, state):
        self.uses = state["uses"]


def test_extra_state_of_modules_is_exported(tmp_path):
    model = torch.nn.Sequential(Counting(4, 4), torch.nn.Linear(4, 4))
    model[0].uses = 7
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1), None, None, {})
    catalog = Catalog(Store(str(tmp_path / "run")))
    catalog.claim(1, None)
    save(catalog, state, 5)
    loaded = load_state(str(tmp_path / "run"))
    other = torch.nn.Sequential(Counting(4, 4), torch.nn.Linear(4, 4))
    other.load_state_dict(loaded.model)
    assert other[0].uses == 7
    assert same(loaded.model["0._extra_state"], model[0].get_extra_state())
    assert invoke("export", tmp_path / "run", tmp_path / "all.pt").exit_code == 0
    found = torch.load(tmp_path / "all.pt", weights_only=True)
    assert found["model"]["0._extra_state"]["uses"] == 7
    refused = invoke("export", tmp_path / "run", tmp_path / "model.safetensors")
    assert refused.exit_code != 0 and "0._extra_state is a dict" in refused.output
