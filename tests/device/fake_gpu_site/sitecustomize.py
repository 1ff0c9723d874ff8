"""Each process that starts with this folder in its PYTHONPATH has a fake GPU."""

from tests.device import fake_gpu

fake_gpu.install()
fake_gpu.enter()
