"""Digests of the final weights of each model of tests/train/jobs.py, trained in this process."""

from __future__ import annotations

import torch

from elastic_dp.config import MapStyleData
from elastic_dp.train.exactness.machine_kind import machine_kind
from tests.runs import Points, local, spec_of
from tests.train.jobs import ZOO


def this_machine() -> str:
    """Return what the bits of the weights depend on."""
    return machine_kind(torch.device("cpu"), True)


def zoo_digest(name: str) -> str:
    """Return the SHA-256 of the weights after 24 steps with evaluations, on one thread."""
    shape = (3, 8, 8) if name == "channels_last" else ()
    config = {"eval": MapStyleData(Points(30), micro_batch_size=8)}
    spec = spec_of(steps=24, workers=1, virtual=6, shape=shape, config=config)
    return local(spec, ZOO[name]).digest
