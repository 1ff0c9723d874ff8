"""`elastic-dp top`: runs in the whole terminal, drawn again and again until Ctrl-C.

Where standard output is no terminal, one frame is printed.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from elastic_dp.cli.look_commands import run_facts, run_workers
from elastic_dp.cli.run_options import Address, AllStoragePath, Json
from elastic_dp.cli.run_tables import (
    TextTable,
    drawn_run,
    one_line,
    overview_table,
    plain_run,
    screen,
)
from elastic_dp.cli.store_options import StorageOption
from elastic_dp.errors import ElasticError
from elastic_dp.report.run_overview import Health
from elastic_dp.wording import counted

if TYPE_CHECKING:
    from elastic_dp.cli.run_sources import RunSource, SeenRun

_MOST_DECISIONS = 8  # of one run, where there is room
# Runs that somebody has to look at come first, those that have ended last.
_ORDER = [
    Health.CONCERN,
    Health.UNKNOWN,
    Health.SILENT,
    Health.STARTING,
    Health.HEALTHY,
    Health.FAILED,
    Health.FINISHED,
]


def top(
    name: Annotated[
        str | None, typer.Argument(metavar="[RUN]", help="Only this run. Default: all.")
    ] = None,
    interval: Annotated[
        float, typer.Option(min=0.2, metavar="SECONDS", help="Between two looks.")
    ] = 1.0,
    storage_path: AllStoragePath = None,
    storage_option: StorageOption = None,
    address: Address = None,
    as_json: Json = False,
) -> None:
    """Watch one run, or all runs, until Ctrl-C or the end of the one run.

    Where the output is no terminal, and with --json, one frame is printed.
    """
    from elastic_dp.cli.run_sources import run_source, runs_source

    source: RunSource
    if name is None:
        source = runs_source(address, storage_path, storage_option)
    else:
        source = run_source(name, address, storage_path, storage_option)
    seen = source.look()
    out = screen()
    if as_json:
        values = [each.to_json_or_reason() for each in seen]
        print(json.dumps(values if name is None else values[0], default=str))
    elif out.is_terminal and not out.is_dumb_terminal:
        last = _watch(source, seen, name is not None, interval, out)
        if last is not None:  # it ended; otherwise somebody has seen enough
            out.print(_drawn_one(last, out.width, sys.maxsize))
    else:
        print(*(_plain_all(seen, source) if name is None else _plain_one(seen[0])), sep="\n")


# ---------------------------------------------------------------------------------- private


def _watch(
    source: RunSource, seen: list[SeenRun], one: bool, interval_s: float, out: Console
) -> SeenRun | None:
    """Draw until Ctrl-C or SIGTERM. Return the one run, if it has ended."""
    error = ""
    try:
        with _signals_end(), Live(console=out, screen=True, auto_refresh=False) as live:
            while True:
                live.update(_frame(source, seen, one, error, out), refresh=True)
                if one and seen[0].overview.is_over:
                    return seen[0]
                time.sleep(interval_s)
                try:
                    seen, error = source.look(), ""
                except ElasticError as problem:  # a store or a head that is away may come back
                    error = one_line(problem)
    except KeyboardInterrupt:
        return None


@contextlib.contextmanager
def _signals_end() -> Iterator[None]:
    """Let SIGTERM do what Ctrl-C does, so that the terminal is left as it was."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _frame(
    source: RunSource, seen: Sequence[SeenRun], one: bool, error: str, out: Console
) -> RenderableType:
    title = f"elastic-dp top  {time.strftime('%H:%M:%S')}  {_summary(seen, source)}  Ctrl-C ends"
    parts: list[RenderableType] = [Text(title, style="reverse", overflow="ellipsis", no_wrap=True)]
    if error:
        parts.append(Text(f"not up to date: {error}", style="bold red"))
    height = out.height - len(parts)
    parts.append(
        _drawn_one(seen[0], out.width, height) if one else _drawn_all(seen, out.width, height)
    )
    return Group(*parts)


def _summary(seen: Sequence[SeenRun], source: RunSource) -> str:
    counts = {health: sum(s.overview.health is health for s in seen) for health in _ORDER}
    words = ", ".join(f"{count} {health}" for health, count in counts.items() if count)
    return f"{counted(len(seen), 'run')} {source.where}{f': {words}' if words else ''}"


def _drawn_all(seen: Sequence[SeenRun], width: int, height: int) -> RenderableType:
    shown = _sorted(seen)[: max(1, height - 2)]
    table = overview_table([each.overview for each in shown]).drawn(width)
    return Group(table, Text(_more(len(seen) - len(shown), "run")))


def _drawn_one(seen: SeenRun, width: int, height: int) -> RenderableType:
    facts = run_facts(seen)
    room = height - len(facts) - 4
    tables = []
    for table in run_workers(seen):
        most = max(1, room - min(len(seen.decisions), _MOST_DECISIONS) - 3)
        tables.append(TextTable(table.header, table.rows[:most]))
        room -= len(table.rows[:most]) + 2
        if more := _more(len(table.rows) - most, "worker"):
            facts.append(("not shown", more))
    if seen.decisions and room > 2:
        tables.append(_decisions(seen, min(room - 2, _MOST_DECISIONS)))
    return drawn_run(seen.overview, facts, tables, width)


def _decisions(seen: SeenRun, most: int) -> TextTable:
    rows = [
        (time.strftime("%H:%M:%S", time.localtime(at)), one_line(text))
        for at, text in seen.decisions[-most:]
    ]
    return TextTable(("time", "decision"), rows)


def _plain_all(seen: Sequence[SeenRun], source: RunSource) -> Iterator[str]:
    yield _summary(seen, source)
    if seen:
        yield from overview_table([each.overview for each in _sorted(seen)]).lines()


def _plain_one(seen: SeenRun) -> Iterator[str]:
    tables = run_workers(seen)
    if seen.decisions:
        tables.append(_decisions(seen, _MOST_DECISIONS))
    yield from plain_run(seen.overview, run_facts(seen), tables)


def _sorted(seen: Sequence[SeenRun]) -> list[SeenRun]:
    return sorted(seen, key=lambda each: _ORDER.index(each.overview.health))


def _more(number: int, noun: str) -> str:
    return f"and {counted(number, f'more {noun}')}" if number > 0 else ""
