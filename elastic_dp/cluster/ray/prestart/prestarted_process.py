"""What a worker's process does before Ray gives it a worker: it imports what workers import.

Ray starts such a process ahead of time (`ProcessPrestarter`), so that a replacement finds one that
has done this. Ray calls the hook of `export_hook` at the start of every process of a worker. One
without a worker ends by itself once the run has ended, or another controller leads it.
"""

from __future__ import annotations

import contextlib
import os
import time
from functools import partial
from typing import Any

import ray
from ray._private.ray_constants import WORKER_PROCESS_SETUP_HOOK_ENV_VAR
from ray._private.runtime_env.setup_hook import decode_function_key

from elastic_dp.cluster.runs import ray_kv_state
from elastic_dp.threads import background

_CHECK_EVERY_S = 2.0
_EXPORT_S = 10
# By value, and without an error: the process may find this package only once it has a worker, by
# the driver's path, and Ray ends a process whose hook fails.
_HOOK = """
import contextlib
with contextlib.suppress(Exception):
    from elastic_dp.cluster.ray.prestart.prestarted_process import prepare
    prepare({run!r}, {token!r})
"""


def export_hook(run: str, token: str) -> dict[str, str]:
    """Store the hook in the GCS. Return the variables of a process that calls it."""
    hook: Any = partial(exec, _HOOK.format(run=run, token=token), {})
    hook.__name__ = prepare.__name__
    functions = ray._private.worker.global_worker.function_actor_manager
    key = functions.export_setup_func(hook, timeout=_EXPORT_S)
    return {WORKER_PROCESS_SETUP_HOOK_ENV_VAR: decode_function_key(key)}


def has_hook() -> bool:
    """Return whether this process, and so each worker, has a hook of the user's."""
    return WORKER_PROCESS_SETUP_HOOK_ENV_VAR in os.environ


def prepare(run: str, token: str) -> None:
    """Import what a worker needs, and end this process if the run no longer does."""
    import_for_worker()
    background("prestarted process", partial(_wait_for_worker, run, token)).start()


def import_for_worker() -> None:
    """Import what a worker needs. Nothing of it may ask CUDA for GPUs."""
    import torch._dynamo  # noqa: F401 - torch imports it with its first optimizer

    import elastic_dp.cluster.ray.worker_actor  # noqa: F401


def _wait_for_worker(run: str, token: str) -> None:
    while ray.get_runtime_context().get_actor_id() is None:
        with contextlib.suppress(Exception):  # the GCS may be away
            if ray_kv_state.prestarted_token(run) != token:
                os._exit(0)
        time.sleep(_CHECK_EVERY_S)
