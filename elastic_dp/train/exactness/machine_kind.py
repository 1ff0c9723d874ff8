"""What determines the bits that a machine computes, and the switches that make it compute the same
bits each time."""

from __future__ import annotations

import os
import platform
import warnings
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch


def machine_kind(device: torch.device, exact: bool) -> str:
    """Equal strings: the same operations give the same bits (with deterministic kernels)."""
    parts = [f"torch {torch.__version__}", f"exact {exact}"]
    if device.type == "cuda":
        p = torch.cuda.get_device_properties(device)
        parts += [
            f"{p.name}, {p.multi_processor_count} SMs, capability {p.major}.{p.minor}",
            f"cuda {torch.version.cuda}, cudnn {torch.backends.cudnn.version()}",
            f"tf32 {torch.backends.cuda.matmul.allow_tf32}/{torch.backends.cudnn.allow_tf32}",
        ]
    else:
        parts += [
            f"cpu {_processor()}, {torch.backends.cpu.get_cpu_capability()}",
            f"threads {torch.get_num_threads()}",
            f"mkldnn {torch.backends.mkldnn.is_available()}",
        ]
    return "; ".join(parts)


def _processor() -> str:
    """By this, too, MKL and oneDNN choose their kernels; vector units of two vendors add in
    different orders."""
    try:
        lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    facts = {name.strip(): value.strip() for name, _, value in (x.partition(":") for x in lines)}
    named = ("vendor_id", "cpu family", "model", "CPU implementer", "CPU part")
    return " ".join(facts[name] for name in named if name in facts)


def software_versions(device: torch.device, code: str) -> tuple[tuple[str, str], ...]:
    """What members must have in common to understand each other and to run the same program, exact
    or not."""
    versions = [
        ("Python", ".".join(platform.python_version_tuple()[:2])),
        ("torch", torch.__version__),
        ("elastic_dp", _version_of_ours()),
        ("code", code),
    ]
    if device.type == "cuda":
        nccl = torch.cuda.nccl.version()
        versions.append(("NCCL", ".".join(map(str, nccl))))
    return tuple(versions)


def _version_of_ours() -> str:
    try:
        return metadata.version("elastic_dp")
    except metadata.PackageNotFoundError:  # sent along as source
        return "not installed"


def why_inexact(operations: Sequence[str], kinds: Sequence[str]) -> tuple[str, ...]:
    """`operations`: without a deterministic kernel. `kinds`: all on which the run has made
    steps."""
    mixed = [f"steps were made on several kinds of machine: {' | '.join(kinds)}"]
    return tuple(dict.fromkeys([*operations, *mixed[: len(kinds) - 1]]))


# Must be in the environment before CUDA starts; the process that starts a worker puts it there.
EXACT_ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


class DeterministicKernels:
    """Deterministic kernels while open; `because` names every operation that had none."""

    def __init__(self, exact: bool) -> None:
        self.because: list[str] = []
        self._exact = exact
        self._restore: Any = None

    def __enter__(self) -> DeterministicKernels:
        if not self._exact:
            return self
        self._restore = (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
            torch.backends.cudnn.benchmark,
            warnings.showwarning,
        )
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark = False
        show = warnings.showwarning

        def note(message: Any, *args: Any, **kwargs: Any) -> None:
            if "deterministic" in str(message):
                self.because.append(str(message).split(".")[0][:200])
            else:
                show(message, *args, **kwargs)

        warnings.showwarning = note
        return self

    def __exit__(self, *_: object) -> None:
        if self._restore is None:
            return
        enabled, warn_only, fill, benchmark, show = self._restore
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark = benchmark
        warnings.showwarning = show
