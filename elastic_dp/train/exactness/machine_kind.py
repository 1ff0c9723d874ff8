"""What determines the bits that a machine computes, and the settings that make them
reproducible."""

from __future__ import annotations

import contextlib
import platform
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, cast

import torch

from elastic_dp.device.attention import exact_attention
from elastic_dp.device.gpu import gpu_kind, is_gpu, nccl_version, settle_cublas
from elastic_dp.errors import SpecError


def machine_kind(device: torch.device, exact: bool) -> str:
    """Returns a text. On machines with equal texts, deterministic kernels compute the same bits."""
    parts = [f"torch {torch.__version__}", f"exact {exact}"]
    if is_gpu(device):
        parts += gpu_kind(device)
    else:
        parts += [
            f"cpu {_processor()}, {torch.backends.cpu.get_cpu_capability()}",
            f"threads {torch.get_num_threads()}",
            f"mkldnn {torch.backends.mkldnn.is_available()}",
        ]
        if (reduced := _reduced(torch.backends.mkldnn)) is not None:
            parts.append(f"fp32 {reduced}")
    return "; ".join(parts)


def _reduced(mkldnn: Any) -> str | None:
    """The precision that oneDNN may use for float32, where it was lowered."""
    found = [
        getattr(getattr(mkldnn, name, None), "fp32_precision", "none")
        for name in ("matmul", "conv", "rnn")
    ]
    return "/".join(found) if set(found) - {"none", "ieee"} else None


def _processor() -> str:
    """Returns the model of the CPU, by which MKL and oneDNN choose their kernels. Vector units of
    different vendors add in different orders."""
    try:
        lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    facts = {name.strip(): value.strip() for name, _, value in (x.partition(":") for x in lines)}
    named = ("vendor_id", "cpu family", "model", "CPU implementer", "CPU part")
    return " ".join(facts[name] for name in named if name in facts)


def software_versions(device: torch.device, code: str) -> tuple[tuple[str, str], ...]:
    """Returns the versions that all members must share, in exact mode or not."""
    versions = [
        ("Python", ".".join(platform.python_version_tuple()[:2])),
        ("torch", torch.__version__),
        ("elastic_dp", _version_of_ours()),
        ("code", code),
    ]
    if is_gpu(device):
        versions.append(("NCCL", nccl_version()))
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


@contextlib.contextmanager
def deterministic_kernels(
    exact: bool, because: list[str], device: torch.device
) -> Iterator[Callable[[], None]]:
    """A context with deterministic kernels, if `exact`. Every operation that had none is added to
    `because`. The function that it gives is to be called again and again, since user code may
    filter warnings. Raises SpecError."""
    if not exact:
        yield lambda: None
        return
    cudnn, deterministic = torch.backends.cudnn, cast(Any, torch.utils.deterministic)
    with contextlib.ExitStack() as restores:
        before = torch.is_deterministic_algorithms_warn_only_enabled()
        enabled = torch.are_deterministic_algorithms_enabled()
        restores.callback(torch.use_deterministic_algorithms, enabled, warn_only=before)
        torch.use_deterministic_algorithms(True, warn_only=True)
        fills = deterministic.fill_uninitialized_memory
        restores.callback(setattr, deterministic, "fill_uninitialized_memory", fills)
        deterministic.fill_uninitialized_memory = False
        by_time = cudnn.benchmark
        try:
            cudnn.benchmark = False
        except RuntimeError as error:  # by torch.backends.disable_global_flags
            raise SpecError(
                "exact=True turns torch.backends.cudnn.benchmark off, and "
                "torch.backends.disable_global_flags(), which this process has called, forbids "
                "that: do not call it (torch.testing._internal.common_utils does when it is "
                "imported), or use exact=False"
            ) from error
        restores.callback(setattr, cudnn, "benchmark", by_time)
        listen = restores.enter_context(_noted(because))
        settle_cublas(device)
        with exact_attention(device):
            yield listen


class _Hook:
    """Takes the place of `warnings.showwarning` and notes warnings of operations without a
    deterministic kernel. It passes on all others, and once its run has ended, all."""

    def __init__(self, because: list[str], show: Callable[..., None]) -> None:
        self.because: list[str] | None = because
        self.show = show

    def __call__(self, message: Any, *args: Any, **kwargs: Any) -> None:
        text = str(message)
        if self.because is None or "deterministic" not in text:
            self.show(message, *args, **kwargs)
            return
        name, _, _ = text.partition(" does not have a deterministic implementation")
        named = f"{name} does not have a deterministic implementation"
        reason = named if text.startswith(named) else text.split(". ")[0]
        if reason not in self.because:
            self.because.append(reason)


@contextlib.contextmanager
def _noted(because: list[str]) -> Iterator[Callable[[], None]]:
    """A context in which warnings of operations without a deterministic kernel are noted. The
    function that it gives restores this where user code has filtered or redirected warnings."""
    added, always = None, torch.is_warn_always_enabled()
    hooks = weakref.WeakSet[_Hook]()

    def forget_filter() -> None:
        with contextlib.suppress(ValueError):  # user code has taken it away
            warnings.filters.remove(added)  # type: ignore[attr-defined]

    def listen() -> None:
        nonlocal added
        torch.set_warn_always(True)
        if added is None or not warnings.filters or warnings.filters[0] is not added:
            forget_filter()
            # Python shows a warning once in a process; this is about each run in it. A filter that
            # is added forgets what was shown, and comes before others.
            warnings.filterwarnings("default", message=".*deterministic")
            added = warnings.filters[0]
        top: Any = warnings.showwarning
        if not isinstance(top, _Hook) or top.because is not because:
            hooks.add(hook := _Hook(because, top))
            warnings.showwarning = hook

    listen()
    try:
        yield listen
    finally:
        torch.set_warn_always(always)
        forget_filter()
        for hook in hooks:  # user code may have kept some
            hook.because = None
        while isinstance(top := warnings.showwarning, _Hook) and top in hooks:
            warnings.showwarning = top.show
