"""What a script sets in torch at its top level holds in workers and in data processes."""

import json
import pickle

import pytest
import torch

import elastic_dp as edp
from elastic_dp.data.pipeline.user_code_process import UserCodeProcess
from elastic_dp.errors import RunMismatch, SpecError
from elastic_dp.torch_settings import apply_torch_settings, torch_settings
from tests.runs import Points, group, local
from tests.train.jobs import adamw, classifier, cross_entropy


@pytest.fixture(autouse=True)
def undone():
    before = torch_settings()
    yield
    apply_torch_settings(before)
    assert torch_settings() == before


def train(ctx):
    model = classifier()

    def loss_fn(m, batch):
        return cross_entropy(m, {**batch, "x": batch["x"].to(torch.get_default_dtype())})

    for _ in ctx.steps(model, adamw(model), loss_fn):
        ctx.log({"settings": torch_settings(), "dtype": str(model[0].weight.dtype)})


def trainer_in(folder):
    return edp.ElasticTrainer(
        train,
        name="run",
        storage_path=str(folder),
        data=edp.MapStyleData(Points(), micro_batch_size=4),
        scaling=edp.ScalingConfig(max_workers=1, virtual_workers=2),
        max_steps=2,
    )


def test_worker_has_the_settings_of_the_script_and_its_bits(tmp_path):
    torch.set_default_dtype(torch.float64)
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.deterministic = True
    torch.backends.cuda.enable_flash_sdp(False)
    trainer = trainer_in(tmp_path)
    trainer._adopt_fixed_fields()
    outcome, run = group(trainer.spec, train)
    alone = local(trainer.spec, train)
    newest = run.controller.metrics.newest
    assert newest["dtype"] == "torch.float64"
    assert newest["settings"] == alone.logged[-1]["settings"] == torch_settings()
    assert outcome.digest == alone.digest


def test_data_process_has_the_settings_of_its_worker():
    torch.set_default_dtype(torch.float64)
    process = UserCodeProcess("a data process")
    process.start(pickle.dumps(torch_settings))
    try:
        assert process.run() == torch_settings()
    finally:
        process.close()


def test_default_dtype_is_part_of_what_a_run_is(tmp_path):
    trainer_in(tmp_path).fit(local=True)
    torch.set_default_dtype(torch.float64)
    with pytest.raises(
        RunMismatch, match=r"default_dtype is 'float64', but the run at .* 'float32'"
    ):
        trainer_in(tmp_path).fit(local=True)


def test_run_of_a_version_without_the_default_dtype_is_accepted(tmp_path):
    trainer_in(tmp_path).fit(local=True)
    record = tmp_path / "run" / "run.json"
    stored = json.loads(record.read_text())
    assert stored.pop("default_dtype") == "float32"
    record.write_text(json.dumps(stored))
    assert trainer_in(tmp_path).fit(local=True).step == 2  # the stored result


def test_default_device_is_refused_with_the_way_out(tmp_path):
    with torch.device("meta"), pytest.raises(SpecError, match=r"'meta'.*\.to\(ctx\.device\)"):
        trainer_in(tmp_path).fit(local=True)
