"""A run whose storage path is reached by its `storage_options` alone: nothing is in the
environment, and nothing of the options is written."""

import dataclasses
import json
import os

import pytest
import torch
from typer.testing import CliRunner

import elastic_dp as edp
from elastic_dp import cli
from elastic_dp.cluster.runs.ended_run import EndedRun
from elastic_dp.config import CheckpointConfig
from elastic_dp.errors import SpecError, StorageError
from elastic_dp.storage import StorageURL, Store
from elastic_dp.train.fault_injection import WorkerFault
from tests.runs import Points, group, local, spec_of, texts_of
from tests.storage.servers import AZURE_KEY, SECRET, azure_options, s3_options
from tests.train.jobs import plain


@pytest.fixture(params=["s3", "az"])
def far(request, monkeypatch):
    """(storage path, options) of a new bucket or container."""
    for name in [name for name in os.environ if name.startswith(("AWS_", "AZURE_"))]:
        monkeypatch.delenv(name)
    if request.param == "s3":
        endpoint, name = request.getfixturevalue("bucket")
        return f"s3://{name}/runs", s3_options(endpoint)
    endpoint, name = request.getfixturevalue("container")
    return f"az://{name}/runs", azure_options(endpoint)


def trainer(path, options, steps=4):
    return edp.ElasticTrainer(
        plain,
        name="far",
        storage_path=path,
        storage_options=options,
        data=edp.MapStyleData(Points(), micro_batch_size=4),
        scaling=edp.ScalingConfig(max_workers=1, virtual_workers=4, threads_per_worker=1),
        max_steps=steps,
    )


def job(steps):
    spec = spec_of(steps=steps, workers=2, virtual=4, min_workers=2)
    return dataclasses.replace(spec, checkpoint=CheckpointConfig(every_steps=3))


def assert_no_secret(texts):
    for text in texts:
        assert SECRET not in text and AZURE_KEY not in text


def words_of(options):
    return [word for pair in options.items() for word in ("--storage-option", "=".join(pair))]


def run(*words):
    done = CliRunner().invoke(cli.app, list(map(str, words)))
    assert done.exit_code == 0, done.output
    assert_no_secret([done.output])
    return done.stdout


def test_a_run_is_stored_gone_on_with_and_read_by_the_options_alone(far, tmp_path):
    path, options = far
    first = trainer(path, options).fit(local=True)
    longer = trainer(path, options, steps=6)
    result = longer.fit(local=True)
    assert (first.step, result.step) == (4, 6)
    stored = longer.fit(local=True)
    assert stored == result
    state = stored.load_state()
    stored.export(tmp_path / "weights.pt")
    weights = torch.load(tmp_path / "weights.pt", weights_only=True)["model"]
    assert all(torch.equal(weights[name], state.model[name]) for name in weights)
    stored.export(f"{path}/weights.safetensors", storage_options=options)
    assert Store(f"{path}/weights.safetensors", options).find(f"{Store(path, options).path}/")
    store = Store(path, options)
    objects = {entry.path: bytes(store.read_all(entry.path)) for entry in store.find(store.path)}
    assert any(name.endswith("run.json") for name in objects)
    assert_no_secret(content.decode("latin-1") for content in objects.values())
    assert_no_secret([repr(longer.spec), repr(stored), repr(longer.url), f"{longer.url}"])


def test_the_commands_read_a_run_by_storage_options(far):
    path, options = far
    trainer(path, options).fit(local=True)
    given = words_of(options)
    where = ["--storage-path", path, *given]
    assert json.loads(run("status", "far", "--json", *where))["step"] == 4
    assert [row["name"] for row in json.loads(run("status", "--json", *where))] == ["far"]
    assert "step" in run("logs", "far", "--events", *where)
    run("logs", "far", *where)
    [row] = json.loads(run("checkpoints", "list", f"{path}/far", "--verify", "--json", *given))
    assert (row["step"], row["wrong"]) == (4, [])
    to = [word.replace("--storage", "--destination") for word in given]
    run("checkpoints", "export", f"{path}/far", f"{path}/far.pt", *given, *to)
    folder = ["checkpoints", "export", f"{path}/far", f"{path}/folder", *given, *to]
    refused = CliRunner().invoke(cli.app, folder)
    assert refused.exit_code == 2 and "without storage options" in refused.output
    assert EndedRun("far", path, options).status()["phase"] == "over"


def test_a_run_on_processes_with_a_kill_has_the_digest_of_a_local_folder(far, tmp_path):
    path, options = far
    spec = job(steps=8)
    url = StorageURL(f"{path}/killed", options)
    killed = WorkerFault("backward", step=5, rank=1, once=str(tmp_path / "dead"))
    outcome, run = group(spec, plain, faults=(killed,), url=url)
    assert outcome.error is None and outcome.workers_lost == 1
    assert outcome.digest == local(spec, plain).digest
    again = job(steps=12)
    outcome, run = group(again, plain, url=url)
    assert outcome.digest == local(again, plain).digest
    said = texts_of(run)
    assert any("step 8" in text for text in said), said


def test_wrong_options_are_refused_before_anything_starts(bucket):
    _, name = bucket
    with pytest.raises(StorageError, match="write secret_access_key"):
        trainer(f"s3://{name}/runs", {"secret": "canary"}).fit(local=True)
    with pytest.raises(SpecError, match="storage_options is a list, must be a dict"):
        trainer(f"s3://{name}/runs", ["key"])


def test_commands_convert_and_inspect_by_storage_options(far, tmp_path):
    path, options = far
    given, rows = words_of(options), tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"id":{n},"x":{n - 0.5}}}\n' for n in (1, 2, 3)))
    wrote = run("data", "convert", rows, f"{path}/shards", "--json", *given)
    assert json.loads(wrote)["rows"] == 3
    assert json.loads(run("data", "inspect", f"{path}/shards", "--json", *given))["rows"] == 3
    assert run("checkpoints", "list", f"{path}/none", "--json", *given) == "[]\n"


@pytest.mark.parametrize("command", [("data", "inspect"), ("checkpoints", "list")])
def test_a_command_with_an_option_of_another_library_names_the_right_one(command):
    words = [*command, "s3://bucket/x", "--storage-option", "secret=canary"]
    done = CliRunner().invoke(cli.app, words)
    assert done.exit_code == 2
    assert "write secret_access_key" in done.output and "canary" not in done.output
