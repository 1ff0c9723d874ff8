"""On a node that counts a GPU which torch does not find, as where an image lacks the driver's path:
nobody trains."""

import pytest
import ray
import torch

import elastic_dp as edp
from elastic_dp.errors import ClusterError
from tests.patience import eventually
from tests.ray import clusters, jobs
from tests.runs import Points

# In CI on processes, and by the errors that Ray gives: tests/cluster/test_device.py.
pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU is there"),
]


@pytest.fixture(autouse=True)
def cluster():
    with clusters.shared() as cluster:
        node = cluster.add_node(num_cpus=1, num_gpus=1)
        yield
        cluster.remove_node(node)


def test_a_worker_whose_gpu_is_not_there_ends_and_gives_it_back(tmp_path, capfd):
    trainer = edp.ElasticTrainer(
        jobs.train,
        name="gpu",
        storage_path=str(tmp_path),
        data=edp.MapStyleData(Points(), micro_batch_size=4),
        scaling=edp.ScalingConfig(resources_per_worker={"CPU": 1, "GPU": 1}),
        failure=edp.FailureConfig(max_losses_without_progress=1),
        max_steps=2,
    )
    with pytest.raises(ClusterError, match="2 losses without a step"):
        trainer.fit()
    said = capfd.readouterr()
    said = said.out + said.err
    assert "w2 is gone: ClusterError: scaling.resources_per_worker asks for 1 GPU" in said
    eventually(lambda: ray.available_resources().get("GPU") == 1, ray.available_resources)
