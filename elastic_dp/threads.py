"""The only place that starts background threads, so that no thread dies unnoticed.

A thread that ends with an exception leaves others waiting for it. So each thread is started with
what then happens to its owner: the run fails, the waiting thread is woken, or the process ends.
"""

from __future__ import annotations

import queue
import sys
import threading
import traceback
from collections.abc import Callable
from typing import TypeVar

from elastic_dp.errors import ElasticError

T = TypeVar("T")


def background(
    name: str, run: Callable[[], object], failed: Callable[[Exception], object] | None = None
) -> threading.Thread:
    """Return a daemon thread that is not started yet.

    `failed` is called with the exception that `run` raises; None means that nothing waits for the
    thread. The traceback is printed, unless the error is an ElasticError and `failed` passes it on.
    """

    def main() -> None:
        try:
            run()
        except BaseException as error:  # SystemExit, too: Python ends a thread of it without a word
            if failed is None or not isinstance(error, ElasticError):
                text = f"the thread {name!r} ended with an error\n{traceback.format_exc()}"
                print(text, end="", file=sys.stderr, flush=True)
            if failed is not None:
                failed(error if isinstance(error, Exception) else RuntimeError(repr(error)))

    return threading.Thread(target=main, name=name, daemon=True)


def take_all(
    waiting: queue.SimpleQueue[T],
    timeout_s: float | None = None,
    gather: Callable[[], object] | None = None,
) -> list[T]:
    """Return all items, for the only thread that takes them. Waits for one, up to `timeout_s`
    (None: for ever), and then calls `gather`, which may wait for others: they wake nobody."""
    try:
        items = [waiting.get(timeout=timeout_s)]
    except queue.Empty:
        return []
    if gather is not None:
        gather()
    return items + [waiting.get() for _ in range(waiting.qsize())]
