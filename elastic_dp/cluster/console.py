"""What `fit()` prints beside the run's journal: the folder at the start, the place of the weights
at the end, and what an interruption has saved.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import sys
import warnings
from collections.abc import Iterator
from types import FrameType

from elastic_dp.checkpoint.catalog import Catalog
from elastic_dp.errors import CheckpointError, Interrupted, StorageError
from elastic_dp.run_record import Result
from elastic_dp.storage import Store, redact_url

AGAIN = "run the same command again to go on"


def start_of_local(name: str, url: str) -> str:
    """Return the first line of a run in this process."""
    return f"run {name} in this process; folder: {redact_url(url)}"


def start_on_ray(name: str, url: str, is_new: bool) -> str:
    """Return the first line of a run on Ray."""
    import ray

    from elastic_dp.cluster.ray import private

    address = ray.get_runtime_context().gcs_address
    dashboard = private.dashboard_url()
    board = f", dashboard http://{dashboard}" if dashboard else ""
    token = "RAY_AUTH_MODE=token " if os.environ.get("RAY_AUTH_MODE") == "token" else ""
    said = (
        f"run {name}{'' if is_new else ', which is live already'}; folder: {redact_url(url)}; "
        f"Ray: {address}{board}"
    )
    return (
        f"{said}; look at it with: {token}elastic-dp status {shlex.quote(name)} --address {address}"
    )


def stored(result: Result) -> str:
    """Return the line that explains a stored result."""
    return (
        f"run {result.name} has ended before, after step {result.step} ({result.reason}): "
        "this is its stored result. To "
        "go on, raise max_steps, epochs or max_time_s; for a new run, use another name. "
        f"{where_weights_are(result)}"
    )


def where_weights_are(result: Result) -> str:
    """Return where the final weights are, and the command that exports them."""
    folder = redact_url(result.path)
    if not result.step:
        return f"no step was made, so there are no weights in {folder}"
    if newest_step(result.path) != result.step:
        return f"the final weights are not in {folder}: it has no checkpoint of step {result.step}"
    return (
        f"final weights: the checkpoint of step {result.step} in {folder}; to make one file "
        "of them: "
        f"elastic-dp checkpoints export {shlex.quote(folder)} weights.safetensors, or Result.export"
    )


def what_was_kept(url: str, step: int | None = None) -> str:
    """Return what an interruption has saved. `step` is the last completed one, if it is known."""
    newest = newest_step(url)
    if newest is None:
        return f"there is no checkpoint; {AGAIN}, from the start"
    if newest == step:
        return f"saved step {newest}; {AGAIN} from there"
    return f"the newest checkpoint is of step {newest}; {AGAIN} from there"


def newest_step(url: str) -> int | None:
    """Return the step of the newest checkpoint; None if there is none, or the store does not
    answer.
    """
    with contextlib.suppress(StorageError, CheckpointError, OSError):
        names = Catalog(Store(url)).names()
        return names[-1].step if names else None
    return None


@contextlib.contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Let SIGTERM do what Ctrl-C does, in the main thread.

    In other threads, and if the script handles SIGTERM, nothing changes.
    """
    from elastic_dp.train.interruption import is_ours_to_handle

    if not is_ours_to_handle(signal.SIGTERM):
        yield
        return

    came = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal came
        came = True
        raise Interrupted(128 + number)

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        if came:  # Ray's calls raise a plain one, which would exit as Ctrl-C does
            raise Interrupted(128 + signal.SIGTERM) from None
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def warn_at_call(text: str) -> None:
    """Warn at the line of the user's script that called this package."""
    level, frame = 1, sys._getframe()
    while frame.f_back and frame.f_globals.get("__name__", "").startswith("elastic_dp."):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)
