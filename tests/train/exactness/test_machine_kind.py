"""Which machines are expected to compute the same bits."""

from pathlib import Path

import pytest
import torch

from elastic_dp.train.exactness.machine_kind import machine_kind

CPUS = {
    "intel": (
        "processor\t: 0\nvendor_id\t: GenuineIntel\ncpu family\t: 6\nmodel\t\t: 106\nmodel "
        "name\t: Xeon @ 2.90GHz\n\n"
    ),
    "older": (
        "processor\t: 0\nvendor_id\t: GenuineIntel\ncpu family\t: 6\nmodel\t\t: 85\nmodel "
        "name\t: Xeon @ 2.90GHz\n\n"
    ),
    "amd": "processor\t: 0\nvendor_id\t: AuthenticAMD\ncpu family\t: 26\nmodel\t\t: 2\n\n",
    "arm": "processor\t: 0\nBogoMIPS\t: 2100.00\nCPU implementer\t: 0x41\nCPU part\t: 0xd40\n\n",
}


def kind(monkeypatch, cpuinfo: str) -> str:
    monkeypatch.setattr(Path, "read_text", lambda path: cpuinfo)
    return machine_kind(torch.device("cpu"), exact=True)


def test_processors_of_two_makes_are_two_kinds_and_their_speed_is_none(monkeypatch):
    kinds = {name: kind(monkeypatch, cpuinfo) for name, cpuinfo in CPUS.items()}
    assert len(set(kinds.values())) == 4, kinds
    again = CPUS["intel"].replace("2.90GHz", "2.60GHz") + CPUS["intel"]
    assert kind(monkeypatch, again) == kinds["intel"]
    assert "GenuineIntel 6 106" in kinds["intel"]


@pytest.mark.parametrize("exact", [False, True])
def test_a_machine_without_proc(monkeypatch, exact):
    def missing(path: Path) -> str:
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "read_text", missing)
    assert f"exact {exact}; cpu " in machine_kind(torch.device("cpu"), exact)
