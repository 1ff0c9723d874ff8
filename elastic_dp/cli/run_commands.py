"""`elastic-dp run`, and commands for a run that is live elsewhere: one for each method of `Run`.

Modules that need ray or torch are imported where they are used: `elastic-dp` starts without them,
and ended runs are read without them. With --json, standard output is JSON and nothing else; the
script of `run` then prints to standard error. `run` ends with the exit code of its script: 0 if it
returned, 1 if it or the run failed, 2 if the job is invalid.
"""

from __future__ import annotations

import contextlib
import re
import runpy
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from elastic_dp.cli.run_options import (
    Address,
    Json,
    Name,
    StorageOption,
    StoragePath,
    find_live_run,
    find_run,
    name_and_path,
    print_json,
    print_reply,
    storage_options,
)
from elastic_dp.cli.run_tables import printable
from elastic_dp.errors import ElasticError, SpecError
from elastic_dp.wording import counted

_LAST_LINES = 100
_RunAddress = Annotated[
    str | None,
    typer.Option(
        envvar="RAY_ADDRESS",
        help="The Ray cluster, as HOST:6379. Default: a Ray of the run's own, which ends with it.",
    ),
]
_Job = Annotated[
    Path,
    typer.Argument(metavar="JOB.py", exists=True, dir_okay=False, help="A script that trains."),
]
_Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="FIELD=VALUE",
        help="Change the job: scaling.max_workers=8, max_steps=100, config.width=512.",
    ),
]
_Arguments = Annotated[
    list[str] | None, typer.Argument(metavar="[-- ARGS]", help="For the script itself.")
]


def run(
    job: _Job,
    arguments: _Arguments = None,
    set_: _Set = None,
    restart: Annotated[
        bool,
        typer.Option(
            "--restart",
            help="If the run is live, stop it with a checkpoint, and continue it with this script: "
            "new code, or another image. The new job is checked first.",
        ),
    ] = False,
    address: _RunAddress = None,
    as_json: Json = False,
) -> None:
    """Run a job's script, with fields of the job set by options.

    Running it again attaches to the live run, continues from its newest checkpoint, or returns the
    result of a finished run.
    """
    from elastic_dp.cluster.overrides import Overrides, overriding
    from elastic_dp.run_record import read_result

    overrides = Overrides(set_ or [], restarts=restart)
    if address is not None:
        from elastic_dp.cluster.ray.cluster_connection import connect

        connect(address)
    with contextlib.ExitStack() as stack:
        if as_json:
            stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        stack.enter_context(overriding(overrides))
        stack.enter_context(_as_script(job, arguments or []))
        code, error = _execute(job)
    if set_ and not overrides.urls and code == 0:
        raise SpecError(f"--set changed nothing: {job} makes no ElasticTrainer")
    if as_json:
        # Where it failed, what is stored is of a start before.
        results = [(url, None if code else read_result(url)) for url in overrides.urls]
        ended = [{"url": url} | (asdict(result) if result else {}) for url, result in results]
        said = {"exit_code": code} | ({"error": error} if error else {}) | {"runs": ended}
        print_json(said)
    raise typer.Exit(code)


def logs(
    name: Name,
    worker: Annotated[str | None, typer.Option(help="Only this worker. Default: all.")] = None,
    tail: Annotated[
        int | None,
        typer.Option(
            min=1, help=f"The number of last lines of each worker. Default: {_LAST_LINES}."
        ),
    ] = None,
    events: Annotated[
        bool, typer.Option("--events", help="Print events, commands and metrics instead.")
    ] = False,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Continue until the end of the run.")
    ] = False,
    storage_path: StoragePath = None,
    storage_option: StorageOption = None,
    address: Address = None,
    as_json: Json = False,
) -> None:
    """Print what the workers of a run have printed, up to some seconds ago; or, with --events,
    every event, command and metric.

    The run's folder has the output of all workers: logs/WORKER.log and, for workers that died,
    logs/WORKER.last.log.
    """
    if events and (worker is not None or tail is not None):
        option = "--tail" if worker is None else "--worker"
        raise SpecError(f"{option} is of what workers have printed: leave it or --events out")
    found, printed = find_run(name, address, storage_path, storage_option), events
    tail = tail or _LAST_LINES
    for record in found.events(follow=follow) if events else ():
        if as_json:
            print_json(record)
        else:
            print(printable(_journal_line(record)), flush=True)
    for each, line in () if events else found.logs(worker, tail=tail, follow=follow):
        print_reply({"worker": each, "line": line}, f"{each}  {line}", as_json)
        printed = True
    if not printed:
        print(
            f"no worker of {name} has printed anything that is kept. A run in one process "
            "(fit(local=True)) prints to its own terminal",
            file=sys.stderr,
        )


def scale(
    name: Name,
    size: Annotated[
        int | None,
        typer.Argument(help="The maximum number of workers, within min_workers..virtual_workers."),
    ] = None,
    drain: Annotated[
        str | None,
        typer.Option(metavar="WORKER", help="Let this one leave once it is replaced."),
    ] = None,
    kill: Annotated[
        str | None,
        typer.Option(metavar="WORKER", help="Kill the process of this one, to rehearse a loss."),
    ] = None,
    storage_path: StoragePath = None,
    storage_option: StorageOption = None,
    address: Address = None,
    as_json: Json = False,
) -> None:
    """Change the maximum number of workers of a run, or drain or kill a worker."""
    if [size, drain, kill].count(None) != 2:
        raise SpecError("give one of: a SIZE, --drain WORKER, --kill WORKER")
    found = find_live_run(name, address, storage_path, storage_option)
    if drain is not None:
        found.drain(drain)
        print_reply({"name": name, "worker": drain}, f"{drain} leaves once it is replaced", as_json)
    elif kill is not None:
        found.kill(kill)
        print_reply({"name": name, "worker": kill}, f"{kill} is killed", as_json)
    else:
        found.scale(size)
        words = f"{counted(size or 0, 'worker')} asked for"
        print_reply({"name": name, "size": size}, words, as_json)


def stop(
    name: Name,
    wait: Annotated[bool, typer.Option(help="Wait for the end and print the result.")] = False,
    storage_path: StoragePath = None,
    storage_option: StorageOption = None,
    address: Address = None,
    as_json: Json = False,
) -> None:
    """End a run after one of its next steps, with a checkpoint. Running it again continues from
    there.
    """
    found = find_live_run(name, address, storage_path, storage_option)
    found.stop()
    facts, words = {"name": name}, f"{name} ends after one of its next steps"
    if wait:
        result = found.result()
        facts, words = asdict(result), f"{name} ended after step {result.step}: {result.reason}"
    print_reply(facts, words, as_json)


def rewind(
    name: Name,
    to_step: Annotated[
        int,
        typer.Option("--to-step", min=0, help="To its newest checkpoint of this step or earlier."),
    ],
    leave_out: Annotated[
        str | None,
        typer.Option(metavar="A..B", help="Leave out the rows of these steps from there on."),
    ] = None,
    storage_path: StoragePath = None,
    storage_option: StorageOption = None,
    as_json: Json = False,
) -> None:
    """Let a run that has ended go on from an earlier checkpoint when it is started again, without
    the rows of a bad stretch of steps. `checkpoints list` has its steps.
    """
    from elastic_dp.cluster.runs import rewind as rewinding
    from elastic_dp.cluster.runs.ended_run import EndedRun
    from elastic_dp.run_record import default_storage_path

    stretch, rows = None, ""
    if leave_out is not None:
        found = re.fullmatch(r"([0-9]{1,11})\.\.([0-9]{1,11})", leave_out)
        if found is None:
            raise SpecError(f"--leave-out is {leave_out!r}, must be two steps, as in 41200..41300")
        stretch = int(found[1]), int(found[2])
        rows = f", without the rows of steps {stretch[0]} to {stretch[1]}"
    name, storage_path = name_and_path(name, storage_path)
    folder = storage_path or default_storage_path()
    url = EndedRun(name, folder, storage_options(storage_option)).url
    step = rewinding.rewind(url, to_step, stretch)
    facts = {"name": name, "step": step, "leave_out": stretch}
    print_reply(facts, f"{name} goes on from step {step}{rows}, when it is started again", as_json)


# ---------------------------------------------------------------------------------- private


def _execute(job: Path) -> tuple[int, str]:
    """Run the script. Return (exit code, error) as Python would, but without a traceback for errors
    of this package.
    """
    try:
        runpy.run_path(str(job), run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
            return 1, end.code
        return (end.code if isinstance(end.code, int) else int(end.code is not None)), ""
    except ElasticError as error:
        said = f"{type(error).__name__}: {error}"
        print(said, file=sys.stderr)
        return (2 if isinstance(error, SpecError) else 1), said
    except Exception as error:  # the script's own
        traceback.print_exc()
        return 1, f"{type(error).__name__}: {error}"
    return 0, ""


@contextlib.contextmanager
def _as_script(job: Path, arguments: list[str]) -> Iterator[None]:
    """Set imports and arguments as `python JOB.py` does."""
    argv, path = sys.argv, [*sys.path]
    sys.argv = [str(job), *arguments]
    sys.path.insert(0, str(job.resolve().parent))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path


def _journal_line(line: dict[str, Any]) -> str:
    at = time.strftime("%H:%M:%S", time.localtime(line["time"]))
    kind = line.get("event") or line.get("command") or "metrics"
    if kind == "Explain":
        return f"{at}  {line['text']}"
    rest = {key: value for key, value in line.items() if key not in ("time", "event", "command")}
    return f"{at}  {kind}  " + "  ".join(f"{key}={value}" for key, value in rest.items())
