"""A run on Ray as its driver sees it: status, control, events and result.

The run continues without the driver, and its controller writes the result. A restarting controller
is waited for. After the end, the driver fetches the last status and the error from the controller
once, and keeps them.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import elastic_dp.errors as errors
from elastic_dp.cluster import console
from elastic_dp.cluster.logger_threads import LoggerThreads
from elastic_dp.cluster.worker_logs import follow_logs, read_logs
from elastic_dp.config import JobSpec
from elastic_dp.coordinator import messages as m
from elastic_dp.errors import ClusterError, ModelError, SpecError, UserCodeError
from elastic_dp.report.report_reader import RunFolder
from elastic_dp.run_record import Result, RunOutcome, read_result
from elastic_dp.storage import Store
from elastic_dp.telemetry.journal_reader import read_events
from elastic_dp.telemetry.progress import ProgressPrinter
from elastic_dp.telemetry.run_logger import RunLogger

_FOLLOW_S = 1.0  # how long the controller waits for new lines
_AGAIN_S = 0.1  # between two calls of a controller that restarts


class Run:
    """A run that continues by itself. All methods may be called from any thread of the driver."""

    def __init__(
        self,
        spec: JobSpec,
        url: str,
        controller: Any = None,
        loggers: Sequence[RunLogger | Callable[[Mapping[str, Any]], None]] = (),
        stored: Result | None = None,
        ended: bool = False,
        is_new: bool = False,
    ) -> None:
        """Made by `ElasticTrainer.start` and `attach`.

        `ended`: the run is over, but its controller is still there, and the result in the folder
        may be its own. `is_new`: this process started the run.
        """
        assert (controller is None) == (stored is not None)
        self.controller = controller
        self._spec, self.url, self._loggers = spec, url, loggers
        self._before = None if controller is None or ended else read_result(url)
        self._end: Result | Exception | None = stored
        self._last: dict[str, Any] = {}
        self._ending = threading.Lock()
        self.is_new = is_new

    def status(self) -> dict[str, Any]:
        """Return the run's status as a dict.

        It has the phase and its reason, generation, world size, step, whether the weights are exact
        and why not, what is sharded, the stage of each worker, what they wait for, the newest
        metrics, slow workers, and avoided nodes. Raises ClusterError if the controller is gone.
        """
        if self._end is None:
            try:
                return self._ask("status")
            except ClusterError:
                if self._end is None:
                    raise
        if not self._last:  # no controller was asked after the end
            folder, now = RunFolder(self._spec.name, self.url), time.time()
            self._last = folder.status(folder.report(now), now)
            for only_of_a_folder in ("report", "processes", "lost", "rollbacks"):
                del self._last[only_of_a_folder]
        return dict(self._last)

    def scale(self, size: int | None = None, *, min_workers: int | None = None) -> None:
        """Set the number of workers to at most `size`, and to at least `min_workers`; None:
        unchanged.

        `size` must be within min_workers..virtual_workers. Surplus workers leave at the end of a
        step. Raises SpecError for other values, ClusterError if the run is over.
        """
        self._must_be_live("scale")
        present, most = self._ask("status"), self._spec.scaling.num_virtual_workers
        least = present["min_workers"] if min_workers is None else min_workers
        size = present["size"] if size is None and min_workers is not None else size
        _must_be_within("min_workers", least, 1, most, "1..virtual_workers")
        asked = _must_be_within("size", size, least, most, "min_workers..virtual_workers")
        self._request("scale", m.SizeRequested(asked, min_workers))

    def stop(self, reason: str = "asked by an operator") -> None:
        """End the run after one of the next steps, with a checkpoint. `result()` returns its end.

        Started again, the run continues from there.
        """
        self._request("stop", m.StopRequested(reason))

    def interrupted(self, progress: ProgressPrinter) -> None:
        """Handle a Ctrl-C of the driver.

        If the Ray cluster ends with this process, the run makes a checkpoint and ends first.
        Otherwise it continues.
        """
        from elastic_dp.cluster.ray import private

        if self._end is not None:
            return
        name = self._spec.name
        if not private.owns_cluster():
            progress.say(
                f"the run {name} goes on without this process; {console.AGAIN} following it, "
                f"elastic-dp stop {name} "
                "ends it"
            )
            return
        from elastic_dp.train.interruption import INTERRUPTED, INTERRUPTED_REASON

        progress.say(INTERRUPTED)
        reason, ended = INTERRUPTED_REASON, RunOutcome()
        try:
            with contextlib.suppress(ClusterError):  # it is over
                self.stop(reason)
                ended = self._ask("wait", None)
        finally:  # also where a second Ctrl-C ends the wait
            if ended.result is not None and ended.reason != reason:  # before the stop reached it
                progress.say(f"the run had ended already, after step {ended.step} ({ended.reason})")
            else:
                progress.say(console.what_was_kept(self.url, ended.step or None))

    def checkpoint(self) -> None:
        """Request a checkpoint of one of the next steps; returns at once."""
        self._request("checkpoint", m.CheckpointRequested())

    def drain(self, worker: str, within_s: float | None = None) -> None:
        """Let one worker leave once it is replaced, at the latest after `within_s` seconds.

        Raises SpecError for an unknown worker.
        """
        if within_s is not None and not (isinstance(within_s, int | float) and within_s >= 0):
            raise SpecError(f"within_s is {within_s!r}, must be a number of seconds, or None")
        _must_be_one_of(worker, self._ask("drain", worker, within_s))

    def pids(self) -> dict[str, int]:
        """Return the process id of each running worker."""
        return {worker: pid for worker, (pid, _) in self.processes().items()}

    def processes(self) -> dict[str, tuple[int, str]]:
        """Return the process id of each running worker, and the IP address of its node."""
        return self._ask("processes")

    def kill(self, worker: str) -> None:
        """Kill the process of one worker, as a lost node would, to rehearse that.

        Raises SpecError for an unknown worker.
        """
        _must_be_one_of(worker, self._ask("kill", worker))

    def events(self, *, follow: bool = True) -> Iterator[dict[str, Any]]:
        """Yield every event, command and metric as it comes, until the run ends.

        Without `follow`, yield what there is; after the end of the run, what its folder holds.
        """
        if not follow and self._end is not None:
            yield from read_events(self.url)
            return
        if not follow:
            yield from self._ask("follow", None, 0.0)[1]
            return
        position, ended = None, False
        while self._end is None:
            try:
                position, lines = self._ask("follow", position, _FOLLOW_S)
                was_ended, ended = ended, self._ask("wait", 0.0) is not None
            except ClusterError:
                if self._end is None and self._stored() is None:
                    raise
                return  # another thread, or another driver, has taken the result
            yield from lines
            if was_ended and not lines:
                return

    def logs(
        self, worker: str | None = None, *, tail: int = 100, follow: bool = False
    ) -> Iterator[tuple[str, str]]:
        """Yield (worker, line) of what all workers, or one of them, have printed: the last `tail`
        lines of each, up to some seconds ago, from the run's folder. With `follow` also new lines
        until the run ends.
        """
        if follow and self._end is None:
            return follow_logs(Store(self.url), worker, tail, lambda: self._goes_on(_FOLLOW_S))
        return read_logs(Store(self.url), worker, tail)

    def result(self, *, progress: ProgressPrinter | None = None) -> Result:
        """Wait for the end and return the result. Raises UserCodeError, another TrainError, or
        ClusterError if the run failed.
        """
        with self._ending:
            if self._end is None:
                self._end = self._wait(progress)
        if isinstance(self._end, Exception):
            raise self._end
        return self._end

    # ------------------------------------------------------------------------------ private

    def _wait(self, progress: ProgressPrinter | None) -> Result | Exception:
        import ray

        loggers = LoggerThreads(self._loggers, self._spec.name, self.url)
        try:
            try:
                for line in self.events():
                    loggers.put(line)
                    if progress is not None:
                        progress.show(line)
            finally:
                loggers.close()
            outcome: RunOutcome = self._ask("wait", None)
            self._last = self._ask("status")
        except ClusterError:
            stored = self._stored()
            if stored is None:
                raise
            return stored
        end = outcome.result or error_of(outcome)
        self._end = end  # from here on no thread asks the controller
        with contextlib.suppress(ray.exceptions.RayActorError):  # another driver was quicker
            ask(self.controller, "forget", patience_s=0.0)
        ray.kill(self.controller)
        return end

    def _goes_on(self, timeout_s: float) -> bool:
        """Return whether the run has not ended within that time."""
        try:
            return self._ask("wait", timeout_s) is None
        except ClusterError:
            if self._end is None and self._stored() is None:
                raise
            return False  # another thread, or another driver, has taken the result

    def _stored(self) -> Result | None:
        """Return the result in the run's folder, if it is newer than this driver."""
        stored = read_result(self.url)
        return None if stored == self._before else stored

    def _request(self, verb: str, event: m.Event) -> None:
        self._must_be_live(verb)
        self._ask("request", event)

    def _ask(self, method: str, *args: Any) -> Any:
        import ray

        self._must_be_live(method)
        patience_s = self._spec.failure.orphan_timeout  # by then its workers have gone, too
        try:
            return ask(self.controller, method, *args, patience_s=patience_s)
        except ray.exceptions.RayActorError as error:
            raise ClusterError(
                f"the controller of the run {self._spec.name!r} is gone; "
                f"{self.url}/events.jsonl says what "
                f"happened up to then ({str(error).splitlines()[0]})"
            ) from error

    def _must_be_live(self, method: str) -> None:
        if self._end is not None:
            raise ClusterError(f"the run {self._spec.name!r} is over; {method} needs a live one")


def _must_be_one_of(worker: str, workers: Sequence[str]) -> None:
    if worker not in workers:
        raise SpecError(
            f"worker is {worker!r}, must be one of "
            f"{', '.join(sorted(workers)) or 'those that are up: none is'}"
        )


def _must_be_within(name: str, number: Any, least: int, most: int, words: str) -> int:
    if isinstance(number, int) and not isinstance(number, bool) and least <= number <= most:
        return number
    raise SpecError(
        f"{name} is {number!r}, must be a whole number within {least}..{most} ({words})"
    )


def ask(controller: Any, method: str, *args: Any, patience_s: float) -> Any:
    """Return the controller's answer. A restarting controller is asked again, which is safe:
    requests are idempotent.

    Raises RayActorError if it is gone, or unavailable for `patience_s` seconds.
    """
    import ray

    until = time.monotonic() + patience_s
    while True:
        try:
            return ray.get(getattr(controller, method).remote(*args))
        except ray.exceptions.ActorUnavailableError:
            if time.monotonic() > until:
                raise
            time.sleep(_AGAIN_S)


def error_of(outcome: RunOutcome) -> Exception:
    """Return the exception that a failed run raises in the driver.

    An error of this package is created again from its facts; any other error of a worker becomes a
    UserCodeError.
    """
    text = outcome.error or ""
    kind, _, message = text.partition(": ")
    if outcome.error_facts is not None:
        return getattr(errors, kind)(*outcome.error_facts)
    if outcome.error_worker:
        return UserCodeError(outcome.error_worker, text, outcome.traceback)
    if kind == ModelError.__name__:  # found by the coordinator, which compares the workers' models
        return ModelError(message)
    return ClusterError(f"{text}\n\n{outcome.traceback}".strip())
