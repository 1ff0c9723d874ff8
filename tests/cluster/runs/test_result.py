"""What a Result has: the final weights, as a state and as a file, for as long as they are there."""

import dataclasses
import json
import math
import shutil
import uuid

import pytest
import torch
from safetensors.torch import load, load_file

import elastic_dp as edp
from elastic_dp.errors import CheckpointError
from elastic_dp.run_record import RunLimits, read_result, run_names, write_result
from elastic_dp.storage import Store
from tests.runs import Points
from tests.train.jobs import classifier, digest_of, logs_its_loss


def trainer(tmp_path, max_steps=3, train=logs_its_loss):
    return edp.ElasticTrainer(
        train,
        name="ends",
        storage_path=tmp_path,
        data=edp.MapStyleData(Points(), micro_batch_size=4),
        max_steps=max_steps,
    )


@pytest.fixture
def result(tmp_path):
    return trainer(tmp_path).fit(local=True)


def test_load_state_has_the_final_weights_of_a_run_without_a_checkpoint_config(result):
    loaded = result.load_state()
    assert (loaded.step, digest_of(loaded.model)) == (3, result.weights_sha256)
    assert loaded.optimizer["state"]
    again = read_result(result.path)
    assert again == result and digest_of(again.load_state().model) == result.weights_sha256


def test_the_result_of_a_finished_run_that_is_run_again_has_its_weights(result, tmp_path):
    again = trainer(tmp_path).fit(local=True)
    assert again == result and digest_of(again.load_state().model) == result.weights_sha256


def test_metrics_that_are_not_finite_are_json_in_the_file_and_numbers_in_the_result(tmp_path):
    metrics = {"loss": math.inf, "by_class": [1.0, {"rare": -math.inf}]}
    result = edp.Result("ends", str(tmp_path), 3, "the last step", "", True, metrics=metrics)
    write_result(str(tmp_path), result, RunLimits())
    json.loads((tmp_path / "result.json").read_text(), parse_constant=pytest.fail)
    assert read_result(str(tmp_path)) == result


def test_a_run_at_a_relative_path_stays_in_its_folder(tmp_path, monkeypatch):
    def train(ctx):
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        logs_its_loss(ctx)

    monkeypatch.chdir(tmp_path)
    made = trainer("runs", train=train)
    assert made.fit(local=True).load_state().step == 3
    assert (tmp_path / "runs" / "ends" / "result.json").is_file()


def test_the_result_of_a_folder_that_was_moved_has_its_weights(result, tmp_path):
    (tmp_path / "ends").rename(tmp_path / "moved")
    moved = read_result(str(tmp_path / "moved"))
    assert moved.path == str(tmp_path / "moved")
    assert digest_of(moved.load_state().model) == result.weights_sha256


def test_export_writes_what_safetensors_and_torch_load_alone(result, tmp_path):
    result.export(tmp_path / "weights.safetensors")
    weights = load_file(tmp_path / "weights.safetensors")
    assert list(weights.keys()) and weights.keys() == classifier().state_dict().keys()
    assert digest_of(weights) == result.weights_sha256
    result.export(str(tmp_path / "state.pt"))
    assert digest_of(torch.load(tmp_path / "state.pt")["model"]) == result.weights_sha256


@pytest.mark.parametrize("url", ["memory://w.safetensors", "memory://folder/w.safetensors"])
def test_export_writes_to_any_url(result, url):
    result.export(url)
    store = Store(url)
    assert digest_of(load(bytes(store.read_all(store.path)))) == result.weights_sha256


def test_export_to_a_relative_path_writes_to_the_working_directory(result, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    result.export("w.safetensors")
    assert digest_of(load_file(tmp_path / "here" / "w.safetensors")) == result.weights_sha256


def test_a_deleted_checkpoint_is_an_error_with_a_way_out(result, tmp_path):
    shutil.rmtree(tmp_path / "ends" / "checkpoints")
    for take in (result.load_state, lambda: result.export(tmp_path / "w.safetensors")):
        with pytest.raises(
            CheckpointError, match=r"no checkpoint of its last step, 3: .* new name="
        ):
            take()


def test_a_result_whose_run_went_on_names_the_steps_there_are(result):
    earlier = dataclasses.replace(result, step=2)
    with pytest.raises(CheckpointError, match=r"load_state\(.*, step=N\) loads one of steps 3"):
        earlier.load_state()


def test_listing_runs_asks_for_no_object_within_a_run(monkeypatch):
    root = Store(f"memory://{uuid.uuid4()}")
    for name in ("b/run.json", "b/checkpoints/step-1/part", "a/run.json", "other/notes.txt", "x"):
        root.write(f"{root.path}/{name}", b"{}")
    look, listed = Store.look, []

    def shallow(store, folder, *, deep):
        listed.append((folder, deep))
        return look(store, folder, deep=deep)

    monkeypatch.setattr(Store, "look", shallow)
    before = root.counts.requests
    assert run_names(root) == ["a", "b"]
    assert listed == [(root.path, False)] and root.counts.requests - before == 1 + 3
    assert run_names(root, known={"a", "b"}) == ["a", "b"]
    assert root.counts.requests - before == (1 + 3) + (1 + 1)
