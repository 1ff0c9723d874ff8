"""What is set on the command line reaches the job by name and type, and nothing else does."""

import pytest

from elastic_dp.cluster import overrides as module
from elastic_dp.cluster.overrides import Overrides, overriding
from elastic_dp.cluster.trainer import ElasticTrainer
from elastic_dp.config import DataConfig, ScalingConfig
from elastic_dp.errors import SpecError


def made(*texts: str) -> ElasticTrainer:
    with overriding(Overrides(texts)):
        return ElasticTrainer(
            print,
            name="job",
            storage_path="/runs",
            config={"width": 8, "lr": 0.1, "deep": {"on": True}, "eval": data(), "any": None},
            data=data(),
            scaling=ScalingConfig(min_workers=1, max_workers=2),
        )


def made_without() -> ElasticTrainer:
    return ElasticTrainer(print, name="job", storage_path="/runs", data=data())


def data() -> DataConfig:
    return DataConfig("/rows", micro_batch_size=4, epochs=1)


def test_fields_are_set_by_name_and_type() -> None:
    trainer = made(
        "scaling.min_workers=4",  # more than the script's max_workers: both change together
        "scaling.max_workers=8",
        "scaling.resources_per_worker.GPU=1",
        "checkpoint.every_s=2.5",
        "failure.orphan_timeout_s=none",
        "exact=false",
        "max_steps=10",
        "data.url=s3://b/a=b",
        'data.columns=["a", "b"]',
        "data.tail=short",
        "config.lr=1",
        "config.deep.on=false",
        "config.eval.micro_batch_size=16",
        'config.any={"a": [1]}',
    )
    spec = trainer.spec
    assert (spec.scaling.min_workers, spec.scaling.max_workers) == (4, 8)
    assert spec.scaling.resources_per_worker == {"CPU": 1, "GPU": 1.0}
    assert (spec.checkpoint.every_s, spec.failure.orphan_timeout_s) == (2.5, None)
    assert (spec.exact, spec.max_steps) == (False, 10)
    assert (spec.data.url, spec.data.columns, spec.data.tail) == ("s3://b/a=b", ["a", "b"], "short")
    assert spec.config["lr"] == 1.0 and isinstance(spec.config["lr"], float)
    assert spec.config["deep"] == {"on": False} and spec.config["any"] == {"a": [1]}
    assert spec.config["eval"].micro_batch_size == 16


def test_field_of_a_few_values_is_set_by_the_name_of_one() -> None:
    assert made("sharding=optimizer").spec.sharding == "optimizer"
    assert made("sharding=none").spec.sharding is None
    assert made("staleness=1").spec.staleness == 1


def test_restart_of_a_run_in_one_process_is_refused() -> None:
    with overriding(Overrides(restarts=True)), pytest.raises(SpecError, match="runs on Ray"):
        made_without().fit(local=True)


def test_the_folder_of_what_was_made_is_known_and_nothing_stays_in_force() -> None:
    overrides = Overrides(["name=other", "storage_path=/there"])
    with overriding(overrides):
        trainer = ElasticTrainer(print, data=data())
    assert overrides.urls == [trainer.url] == ["/there/other"]
    assert module.active is not overrides
    assert made().spec.scaling.max_workers == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "scaling.max_worker=8",
            "scaling.max_worker is no field of scaling; it has: min_workers",
        ),
        ("size=8", "size is no field of a job; it has: name, storage_path, data"),
        ("config.widht=8", "config.widht is no field of config; it has: width, lr"),
        ("scaling.max_workers=eight", "max_workers is 'eight', must be a whole number"),
        ("scaling.max_workers=2.0", "must be a whole number"),
        ("scaling.virtual_workers=x", "virtual_workers is 'x'"),
        ("exact=1", "exact is 1, must be True or False"),
        ("sharding=all", "sharding is 'all', must be one of None, 'optimizer'"),
        ("staleness=2", "staleness is 2, must be 0 or 1"),
        ("comm_hook=bf16", "comm_hook= does not exist any more: use wire="),
        ("scaling.warm_processes=1", "warm_processes does not exist any more: standby=1"),
        ("labels.team=a", "labels= does not exist any more"),
        ("config.labels=1", "config.labels is no field of config; it has: width, lr"),
        ("config.width=wide", "config.width is 'wide', must be of type int, like 8"),
        ("data.tail=cut", "tail is 'cut'"),
        (
            "data.transform=f",
            "transform is",
        ),
        ("scaling.resources_per_worker=4", "resources_per_worker is 4"),
        (
            "scaling=8",
            "scaling is set as a whole, or has no such fields: set its own fields",
        ),
        ("max_steps.more=8", "max_steps is set as a whole, or has no such fields"),
        ("scaling.max_workers", "must be FIELD=VALUE, as in scaling.max_workers=8"),
        ("scaling..x=1", "must be FIELD=VALUE"),
        ("scaling.max_workers=0", "ScalingConfig.max_workers is 0, must be at least 1"),
    ],
)
def test_override_that_cannot_be_set_is_refused_with_the_reason(text: str, said: str) -> None:
    with pytest.raises(SpecError) as caught:
        made(text)
    assert said in str(caught.value)


def test_a_field_of_an_empty_config_ends_its_sentence() -> None:
    with overriding(Overrides(["config.foo=1"])), pytest.raises(SpecError) as caught:
        ElasticTrainer(print, name="job", storage_path="/runs", data=data())
    assert str(caught.value) == "config.foo is no field of config; it has: none"
