"""The options by which all verbs find a run: `--address`, `--storage-path`, `--json`, and its name.

A run that is live is found on its Ray cluster, and only with the right folder. One that has ended
is found by its storage path, without a cluster.
"""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from elastic_dp.errors import ClusterError, SpecError

if TYPE_CHECKING:
    from elastic_dp.cluster.run_handle import Run
    from elastic_dp.cluster.runs.ended_run import EndedRun

Json = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else.")]
Address = Annotated[
    str | None,
    typer.Option(
        envvar="RAY_ADDRESS",
        help="The Ray cluster, as HOST:6379. Default: the one of this user on this machine that "
        "has the run.",
    ),
]
StoragePath = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="The run's storage_path; finds a run that has ended, without a cluster. "
        "Default: ~/elastic_dp_runs, too.",
    ),
]
StorageOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=VALUE",
        help="An option of the store, as in storage_options: endpoint=http://minio:9000. May "
        "be repeated. Other users "
        "of the machine can read a command's arguments: put secrets into the environment.",
    ),
]
Name = Annotated[str, typer.Argument(metavar="RUN", help="The run's name, or its folder.")]


def storage_options(said: list[str] | None) -> dict[str, Any] | None:
    """true and false are what they say; every other value is a text."""
    options: dict[str, Any] = {}
    for each in said or ():
        name, mark, value = each.partition("=")
        if not (name and mark):
            raise typer.BadParameter(f"--storage-option {name[:8]}… must be of the form NAME=VALUE")
        options[name] = {"true": True, "false": False}.get(value.lower(), value)
    return options or None


def name_and_path(name: str, storage_path: str | None) -> tuple[str, str | None]:
    """Return the run's name and storage path. RUN may be its folder, which is both."""
    if "/" not in name:
        return name, storage_path
    if storage_path is not None:
        raise SpecError(f"{name} is a folder: leave out --storage-path, or give the run's name")
    storage_path, _, name = name.rstrip("/").rpartition("/")
    return name, storage_path or "/"


def print_json(value: Any) -> None:
    """JSON has no numbers that are not finite: they become null."""
    text = json.dumps(value, default=str)
    print(json.dumps(json.loads(text, parse_constant=lambda name: None)), flush=True)


def print_reply(facts: dict[str, Any], words: str, as_json: bool) -> None:
    if as_json:
        print_json(facts)
    else:
        print(words, flush=True)


def find_run(
    name: str, address: str | None, storage_path: str | None, storage_option: list[str] | None
) -> Run | EndedRun:
    """Return the run. If its folder says that no cluster has it, return what the folder holds,
    without Ray. Without a storage path, a live run of any folder comes before one in the default
    folder, unless `address` is given: only that cluster is asked then.
    """
    name, storage_path = name_and_path(name, storage_path)
    from elastic_dp.cluster.runs.ended_run import EndedRun
    from elastic_dp.run_record import default_storage_path

    ended = url = None
    if storage_path is not None:
        ended = EndedRun(name, storage_path, storage_options(storage_option))
        if not ended.holder:
            return ended
        url = ended.url
    elif address is None:
        with contextlib.suppress(ClusterError):
            ended = EndedRun(name, default_storage_path())
    from elastic_dp.cluster.runs.attach import SeveralRuns, find_live

    try:
        return find_live(name, url, address)
    except SeveralRuns:
        raise
    except ClusterError:
        if ended is None:
            raise
        return ended  # no cluster has it: only what is stored


def find_live_run(
    name: str, address: str | None, storage_path: str | None, storage_option: list[str] | None
) -> Run:
    """Return the run to steer it. Raises ClusterError if it is not live, and says how it ended if
    its folder is known, or if it is the run of another user.
    """
    from elastic_dp.cluster.run_handle import Run

    found = find_run(name, address, storage_path, storage_option)
    if isinstance(found, Run):
        from elastic_dp.cluster.runs.attach import check_may_steer

        check_may_steer(found, name_and_path(name, storage_path)[1])
        return found
    status = found.status()
    raise ClusterError(
        f"{name} is not live: {status['reason']}. Run its script again to continue from step "
        f"{status['step']}; if that is its last step, raise its limit"
    )
