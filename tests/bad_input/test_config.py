"""Values and arguments that a job cannot have: a typed error that names the field and the way out,
before anything starts."""

import functools
import math
import re
from pathlib import Path

import pyarrow as pa
import pytest
from torch.utils.data import DataLoader, IterableDataset, WeightedRandomSampler

import elastic_dp as edp
from elastic_dp import errors
from elastic_dp.errors import (
    SpecError,
)
from tests.bad_input.jobs import HUGE, good, trainer
from tests.runs import Points


class Stream(IterableDataset):
    def __iter__(self):
        return iter(())

    def __repr__(self):
        return "Stream()"


# What a configuration needs beside what is wrong with it.
LEAST = {
    edp.DataConfig: {"url": "x", "micro_batch_size": 1},
    edp.MapStyleData: {"dataset": [1], "micro_batch_size": 1},
}
CACHED = {"url": "s3://bucket/rows", "cache_dir": "/cache", "cache_bytes": 1 << 30}
MISTAKES = {
    edp.ScalingConfig: [
        ({"max_workers": None}, ["ScalingConfig.max_workers is None"]),
        ({"min_workers": 3, "max_workers": 2}, ["min_workers is 3", "max_workers"]),
        ({"max_workers": 8, "virtual_workers": 4}, ["virtual_workers is 4", "at least 8"]),
        ({"max_workers": 0}, ["max_workers is 0"]),
        ({"min_workers": 0}, ["min_workers is 0"]),
        ({"virtual_workers": 0}, ["virtual_workers is 0"]),
        ({"standby": -1}, ["standby is -1"]),
        ({"max_workers": 2.5}, ["max_workers is 2.5", "whole number"]),
        ({"threads_per_worker": 0}, ["threads_per_worker is 0"]),
        ({"stabilization_s": -1}, ["stabilization_s is -1"]),
        ({"market": "cheap"}, ["market is 'cheap'", "'spot-first'"]),
        ({"balance": "fair"}, ["balance is 'fair'", "'measured'"]),
        ({"min_on_demand": 2}, ["min_on_demand does not exist any more", 'market="spot-first"']),
        ({"zones": ["a"]}, ["zones does not exist any", '"ray.io/availability-zone": "in(a,b)"']),
        ({"label_selector": {"team": 1}}, ["selector is {'team': 1}", "must be a dict of strings"]),
        (
            {"market": "spot", "label_selector": {"ray.io/market-type": "spot"}},
            ["names ray.io/market-type"],
        ),
        ({"label_selector": {"a": "in()"}}, ["label_selector has 'a': 'in()'", "!in(a,b)"]),
        ({"label_selector": {"a b": "c"}}, ["label_selector has 'a b': 'c'"]),
        ({"label_selector": {"a": "c d"}}, ["label_selector has 'a': 'c d'"]),
        ({"resources_per_worker": ["GPU"]}, ["must be a dict of amounts"]),
        ({"resources_per_worker": {"GPU": math.nan}}, ["'GPU'] is nan, must be f"]),
        ({"resources_per_worker": {"GPU": -1}}, ["resources_per_worker['GPU'] is -1"]),
        (
            {"resources_per_worker": {"GPU": 2}, "max_workers": 4},
            ["['GPU'] is 2, and a worker trains on one GPU", '"GPU": 1', "max_workers=8"],
        ),
        ({"resources_per_worker": {"GPU": 1.5}}, ["['GPU'] is 1.5", "max_workers=2"]),
        *(
            (
                {"resources_per_worker": {"GPU": gpus}, "processes_per_worker": 4},
                [f"['GPU'] is {gpus}", "processes_per_worker is 4", 'ask for "GPU": 4'],
            )
            for gpus in (0.5, 1, 2, 8)
        ),
        ({"resources_per_worker": {5: 1}}, ["[5]: a resource's name must be a string"]),
        (
            {"processes_per_worker": 3, "nodes_per_worker": 2},
            ["nodes_per_worker is 2 and processes_per_worker is 3, which"],
        ),
        (
            {"processes_per_worker": 2, "nodes_per_worker": 2, "resources_per_worker": {"CPU": 0}},
            ["nodes_per_worker is 2, so resources_per_worker must"],
        ),
        *(
            (
                {"processes_per_worker": 2, name: 2},
                [f"{name} does not exist any more", "fully_shard(model"],
            )
            for name in ("tensor_parallel_size", "context_parallel_size")
        ),
        ({"num_workers": 2, "use_gpu": True}, ["num_workers does not exist: write max_workers="]),
        ({"use_gpu": True}, ["use_gpu does not exist", '{"GPU": 1}']),
        ({"warm_processes": 1}, ["warm_processes does not exist any more", "standby=1"]),
    ],
    edp.FailureConfig: [
        ({"heartbeat_timeout_s": math.inf}, ["heartbeat_timeout_s is inf, must be f"]),
        ({"heartbeat_timeout_s": None}, ["heartbeat_timeout_s is None"]),
        ({"heartbeat_interval_s": 0.1}, ["it is 0.25 s, or an eighth of heartbeat_timeout_s"]),
        ({"hang_timeout_s": 0}, ["hang_timeout_s is 0", "at least 1.0"]),
        ({"hang_timeout_s": "5"}, ["hang_timeout_s is '5'", "number"]),
        ({"compare_weights_every": 0}, ["compare_weights_every is 0", "at least 1"]),
        ({"compare_weights_every": 2.5}, ["compare_weights_every is 2.5", "whole number"]),
        ({"max_user_errors": -1}, ["max_user_errors is -1"]),
        ({"max_user_errors": 0.5}, ["max_user_errors is 0.5, must be a whole number"]),
        ({"max_losses_without_progress": 0}, ["max_losses_without_progress is 0"]),
        ({"max_out_of_memory": 0}, ["max_out_of_memory does not exist any more: it is 5"]),
        ({"max_losses_of_micro_batch": 1}, ["max_losses_of_micro_batch does not exist any more"]),
        ({"lease_s": 3.0}, ["lease_s does not exist any more: it is 2 × heartbeat_timeout_s"]),
        ({"release_timeout_s": 3.0}, ["release_timeout_s does not exist any more"]),
        ({"max_failures": 3}, ["write max_user_errors="]),
        ({"orphan_timeout_s": 5.0}, ["orphan_timeout_s is 5.0, less than the lease (10 s)"]),
        ({"orphan_timeout_s": "never"}, ["orphan_timeout_s is 'never', must be a number"]),
    ],
    edp.CheckpointConfig: [
        ({"every_s": math.nan}, ["every_s is nan, must be finite"]),
        ({"every_steps": 0}, ["every_steps is 0"]),
        ({"every_s": -1.0}, ["every_s is -1.0"]),
        ({"every_s": "often"}, ["every_s is 'often', must be one of 'auto'"]),
        ({"every": "auto"}, ['every does not exist any more: write every_s="auto"']),
        ({"checkpoint_score_order": "best"}, ["checkpoint_score_order is 'best'"]),
    ],
    edp.DataConfig: [
        ({"micro_batch_size": None}, ["micro_batch_size is None"]),
        ({"micro_batch_size": 0}, ["DataConfig.micro_batch_size is 0"]),
        ({"epochs": 0}, ["DataConfig.epochs is 0"]),
        ({"transform": 3}, ["transform is 3"]),
        ({"columns": "x"}, ["columns is 'x', must be a list of one column name or more"]),
        ({"columns": {"x"}}, ["columns is {'x'}"]),
        ({"columns": ["x", 1]}, ["columns is ['x', 1]"]),
        ({"url": {"x": 1.0, "y": 2.0}, "tail": "short"}, ["tail is 'short', and url has weights"]),
        ({"url": {"x": HUGE}}, [", must be finite"]),
        (
            {"url": ["a", "part-{000..010}.tar"]},
            ["'part-{000..010}.tar' has a brace list, which is not expanded any more: name the U"],
        ),
        ({"url": {"{a,b}": 1.0}}, ["has a brace list"]),
        *(
            ({"max_bad_fraction": limit}, ["max_bad_fraction is"])
            for limit in (-0.1, 1.5, None, "1%", True, math.nan)
        ),
        (CACHED | {"cache_dir": "cache"}, ["cache_dir is 'cache'", "absolute path"]),
        (CACHED | {"cache_dir": 5}, ["cache_dir is 5", "absolute path"]),
        (CACHED | {"cache_bytes": None}, ["cache_dir is set alone", "cache_bytes its limit"]),
        (CACHED | {"cache_dir": None}, ["cache_bytes is set alone", "cache_dir is the folder"]),
        (CACHED | {"cache_bytes": 100}, ["cache_bytes is 100", "1048576"]),
        (CACHED | {"cache_bytes": "1 GB"}, ["cache_bytes is '1 GB'", "whole number"]),
    ],
    edp.MapStyleData: [
        ({"seed": None}, ["seed is None"]),
        ({"shuffle": "none"}, ["shuffle is 'n"]),
        ({"collate_fn": 3}, ["collate_fn is 3"]),
        ({"dataset": {"train": [1]}}, ["dataset is a dict, whose"]),
        ({"dataset": "/rows"}, ["DataConfig with a URL"]),
        ({"dataset": Stream()}, ["write a stream of rows as shards once"]),
        ({"dataset": pa.table({"x": [1]})}, ["a Table of pyarrow, whose [0] is not its first row"]),
    ],
}


@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        pytest.param(make, options, words, id=f"{make.__name__} {options}")
        for make, mistakes in MISTAKES.items()
        for options, words in mistakes
    ],
)
def test_configuration_that_cannot_be_names_field_and_value(make, options, words):
    with pytest.raises(SpecError) as caught:
        make(**LEAST.get(make, {}) | options)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize("gpus", [0, 4])
def test_scaling_config_takes_a_gpu_for_each_process_or_none(gpus):
    edp.ScalingConfig(resources_per_worker={"CPU": 4, "GPU": gpus}, processes_per_worker=4)


@pytest.mark.parametrize("wanted", ["H100", "!H100", "in(A100,H100)", "!in(A100, H100)"])
def test_label_selector_that_ray_takes_is_accepted(wanted):
    edp.ScalingConfig(label_selector={"ray.io/accelerator-type": wanted})


async def waits(ctx):
    good(ctx)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        *(
            ({"name": name}, "name is ")
            for name in ("..", ".", "", " ", "a/b", "a::b", "a\nb", "-rf", 5)
        ),
        ({"name": "é" * 128}, "of 256 bytes, must be at most 255"),
        ({"labels": {"team": "a"}}, "labels= does not exist any more: put them into config="),
        ({"storage_path": 5}, "storage_path is 5"),
        ({"storage_path": ""}, "storage_path is '', must be a path or URL"),
        ({"config": [1]}, "config is a list"),
        ({"scaling": {"max_workers": 2}}, "scaling is a dict, must be a ScalingConfig"),
        ({"failure": 3}, "failure is a int"),
        ({"checkpoint": 500}, "checkpoint is a int"),
        ({"data": "x"}, "data is a str, must be a DataConfig or a MapStyleData"),
        (
            {"data": DataLoader(Points(), batch_size=16, sampler=WeightedRandomSampler([1.0], 1))},
            "data=MapStyleData(Points(...), micro_batch_size=16), with its collate_fn, its num_wor",
        ),
        (
            {"data": DataLoader(Stream(), batch_size=8)},
            'by elastic_dp.dataprep.write_shards, and pass data=DataConfig("shards", micro_batch_',
        ),
        ({"exact": "no"}, "exact is 'no', must be True or False"),
        ({"sharding": "parameters"}, "sharding is 'parameters', must be one of None, 'optimizer'"),
        ({"sharding": True}, "sharding is True, must be one of None, 'optimizer'"),
        ({"sharding": "optimizer", "exact": False}, "sharding is 'optimizer' and exact is False"),
        ({"wire": "fp4"}, "wire is 'fp4', must be one of None, 'bf16', 'int8'"),
        ({"wire": ["bf16"]}, "wire is ['bf16'], must be one of None, 'bf16', 'int8'"),
        ({"wire": "bf16", "exact": False}, "wire is 'bf16' and exact is False: it rounds"),
        ({"wire": "int8", "exact": False}, "wire is 'int8' and exact is False: it rounds"),
        ({"comm_hook": "bf16"}, 'comm_hook= does not exist any more: use wire="bf16"'),
        ({"staleness": 2}, "staleness is 2, must be 0 or 1"),
        ({"staleness": True}, "staleness is True, must be a whole number"),
        ({"staleness": None}, "staleness is None, must be 0 or 1"),
        ({"staleness": 1, "exact": False}, "staleness is 1 and exact is False: after the loss"),
        (
            {"staleness": 1, "scaling": edp.ScalingConfig(processes_per_worker=2)},
            "staleness is 1 and ScalingConfig.processes_per_worker is 2, which do not work",
        ),
        ({"staleness": {0: 0, 9: 2}}, "staleness[9] is 2, must be 0 or 1"),
        ({"staleness": {0: True}}, "staleness[0] is True, must be a whole number"),
        ({"staleness": {9: 1}}, "staleness: the value of the first step is missing; add that of"),
        ({"staleness": {0: 0, 9: 0}}, "staleness[9] is 0, and 0 before: leave it out"),
        ({"staleness": {0: 0, -1: 1}}, "staleness: -1 must be a number of steps, as in {0: 0, 20"),
        ({"staleness": {0: 0, 9: 1}, "exact": False}, "staleness is {0: 0, 9: 1} and exact is F"),
        ({"inner_steps": {0: 1, 9: 0}}, "inner_steps[9] is 0, must be at least 1"),
        ({"inner_steps": {0: 1, 9: None}}, "inner_steps[9] is None: leave it out"),
        ({"inner_steps": {0: 1, "9": 8}}, "inner_steps: '9' must be a number of steps, as in {0:"),
        ({"inner_steps": {}}, "inner_steps: the value of the first step is missing; add that of"),
        ({"inner_steps": {0: 8, 9: 8}}, "inner_steps[9] is 8, and 8 before: leave it out"),
        ({"inner_steps": {0: 1, 9: 8}, "exact": False}, "inner_steps is {0: 1, 9: 8} and exact is"),
        (
            {"staleness": 1, "sharding": "optimizer"},
            "staleness is 1 and sharding is 'optimizer'",
        ),
        ({"inner_steps": 0}, "inner_steps is 0, must be at least 1"),
        ({"inner_steps": 2.0}, "inner_steps is 2.0, must be a whole number"),
        ({"inner_steps": 2, "exact": False}, "inner_steps is 2 and exact is False, which do not"),
        (
            {"inner_steps": 2, "sharding": "optimizer"},
            "inner_steps is 2 and sharding is 'optimizer', which do not",
        ),
        (
            {"inner_steps": 2, "scaling": edp.ScalingConfig(processes_per_worker=2)},
            "inner_steps is 2 and ScalingConfig.processes_per_worker is 2, which do not work",
        ),
        ({"max_time_s": math.inf}, "max_time_s is inf"),
        ({"loggers": print}, "loggers is "),
        ({"loggers": [3]}, "loggers is "),
        ({"loggers": [dict]}, "loggers is "),  # a class, where one of its objects is meant
        ({"runtime_env": "x"}, "runtime_env is a str"),
        ({"runtime_env": {"working_dir": "code"}}, "runtime_env has 'code', but Ray sends"),
        (
            {"runtime_env": {"py_modules": ["s3://b/a.zip", math]}},
            "give it to ray.init(runtime_env",
        ),
        ({"train": lambda: None}, "train takes (), must be a function of one argument (ctx)"),
        ({"train": lambda ctx, other: None}, "train takes (ctx, other)"),
        ({"train": waits}, "train has async or yield, so that a call of it runs nothing"),
        ({"train": lambda ctx: (yield)}, "train has async or yield"),
    ],
)
def test_trainer_argument_of_another_kind_is_refused(tmp_path, options, words):
    data = edp.MapStyleData(Points(), micro_batch_size=4)
    job = {
        "train": good,
        "name": "bad",
        "storage_path": str(tmp_path),
        "data": data,
        "max_steps": 1,
    }
    with pytest.raises(SpecError, match=re.escape(words)):
        edp.ElasticTrainer(**(job | options))


def test_trainer_takes_a_runtime_env_that_ray_takes_for_an_actor(tmp_path):
    environment = {"working_dir": "s3://b/a.zip", "py_modules": None, "env_vars": {"A": "1"}}
    data = edp.MapStyleData(Points(), micro_batch_size=4)
    job = {"storage_path": tmp_path, "name": "a", "data": data, "max_steps": 1}
    assert edp.ElasticTrainer(good, runtime_env=environment, **job).runtime_env == environment


def test_paths_of_data_are_path_objects_as_well():
    a, b = Path("a"), Path("b")
    for url in ([a, "b"], {a: 0.5, b: 0.5}, {0: {a: 1.0}, 9: {b: 1.0}}):
        assert edp.DataConfig(url, micro_batch_size=4).urls == ("a", "b")


def test_trainer_takes_path_objects(tmp_path):
    data = edp.DataConfig(tmp_path / "rows", micro_batch_size=4)
    trainer = edp.ElasticTrainer(good, name="a b", storage_path=tmp_path, data=data, max_steps=1)
    assert (trainer.url, trainer.spec.data.urls) == (f"{tmp_path}/a b", (f"{tmp_path}/rows",))


def test_run_without_a_name_has_that_of_the_script(tmp_path):
    def made(train):
        data = edp.MapStyleData(Points(), micro_batch_size=4)
        return edp.ElasticTrainer(train, storage_path=tmp_path, data=data, max_steps=1)

    assert made(good).spec.name == "jobs" and made(functools.partial(good)).spec.name == "jobs"
    cell = {}
    exec("def train(ctx): pass", cell)
    with pytest.raises(SpecError, match=r"name is missing.*give it a name="):
        made(cell["train"])
    again = made(good)
    again.fit(local=True)
    assert again.fit(local=True).step == 1
    with pytest.raises(SpecError, match="two runs without a name"):
        made(good).fit(local=True)


def test_attach_finds_an_ended_run_by_a_path_object(tmp_path, monkeypatch):
    def connect(address):
        raise errors.ClusterError("no cluster")

    monkeypatch.setattr("elastic_dp.cluster.ray.cluster_connection.connect", connect)
    result = trainer(tmp_path, good).fit(local=True)
    assert edp.attach(result.name, tmp_path).result() == result
    assert trainer(tmp_path, good).start().status()["phase"] == "over"


def test_unknown_argument_of_the_trainer_is_a_type_error(tmp_path):
    with pytest.raises(TypeError, match="unexpected keyword argument 'hook'"):
        trainer(tmp_path, good, hook="bf16")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("PowerSGDConfig", 'use wire="bf16"'),
        ("IterableData", "elastic_dp.dataprep.write_shards"),
        ("batch_lr", "by the sizes in ctx.virtual_workers"),
    ],
)
def test_import_of_a_removed_name_says_what_to_write_instead(name, words):
    with pytest.raises(ImportError, match=words):
        getattr(edp, name)


def test_trainer_without_a_limit_is_refused(tmp_path):
    with pytest.raises(SpecError, match="max_steps is None"):
        trainer(tmp_path, good, max_steps=None)


def test_heartbeat_interval_and_orphan_timeout_by_default_follow_the_timeout():
    assert edp.FailureConfig().heartbeat_interval == 0.25
    assert edp.FailureConfig(heartbeat_timeout_s=0.4).heartbeat_interval == 0.05
    assert edp.FailureConfig(heartbeat_timeout_s=1.0).orphan_timeout == 120.0
