"""Runs as aligned tables: in colours and as wide as the terminal, or as plain lines where standard
output is none.

Plain lines are never cut or wrapped, and hold no escape sequences. Texts of a run are printed
without control characters, which could steer the terminal.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from elastic_dp.report.run_overview import Health, RunOverview
from elastic_dp.report.verdict import duration, share

_STYLES = {
    Health.HEALTHY: "green",
    Health.STARTING: "cyan",
    Health.CONCERN: "yellow",
    Health.SILENT: "yellow",
    Health.FINISHED: "blue",
    Health.FAILED: "bold red",
    Health.UNKNOWN: "magenta",
}
_ENDLESS = 1_000_000  # characters in a line
_MOST_CHARACTERS = 160  # of a text in a table of many runs


def text_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], styles: Sequence[str] = ()
) -> Table:
    """Return a table of cells in one line each. `styles` has the style of each row's second cell.
    Where the terminal is too narrow, the first and the last column are wrapped.
    """
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in header:
        table.add_column(name, no_wrap=name not in (header[0], header[-1]), overflow="fold")
    for number, row in enumerate(rows):
        style = styles[number] if styles else ""
        table.add_row(*(Text(cell, style if at == 1 else "") for at, cell in enumerate(row)))
    return table


def one_line(value: Any, most: int | None = None) -> str:
    """Return a text in one line, without control characters. `most`: of its characters."""
    text = " ".join("".join(c if c.isprintable() else " " for c in str(value)).split())
    return text if most is None or len(text) <= most else text[: most - 1] + "…"


def age(seconds: float | None) -> str:
    """Return a time in one unit: "4 s", "12 min", "3 h", "63 d"; "-" if it is not known."""
    if seconds is None:
        return "-"
    for unit, name in ((86400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{max(0.0, seconds):.0f} s"


def overview_table(overviews: Sequence[RunOverview]) -> Table:
    """Return the table of `status`: what matters first."""
    header = ("run", "health", "step", "loss", "workers", "goodput", "saved", "age", "last event")
    rows = [
        (
            one_line(one.name),
            one.health.value,
            _step(one, "/"),
            _number(one.loss),
            "-" if one.is_over else f"{one.world_size}/{one.size}",
            "-" if one.goodput is None else share(one.goodput, 1.0),
            age(one.checkpoint_age_s),
            age(one.last_event_age_s),
            one_line(one.last_event or one.health_reason, _MOST_CHARACTERS),
        )
        for one in overviews
    ]
    return text_table(header, rows, [_STYLES[one.health] for one in overviews])


def overview_facts(one: RunOverview, more: Sequence[tuple[str, str]] = ()) -> list[tuple[str, str]]:
    """Return one run as (name, value), what matters first. `more` follows the workers."""
    workers = f"generation {one.generation}"
    if not one.is_over:
        workers = f"{one.world_size} of {one.size}, {workers}"
    elif not one.generation:  # it never had a group of workers, or was trained in one process
        workers = ""
    facts = [
        ("step", _step(one, " of ") + _part(one)),
        ("loss", _number(one.loss)),
        ("workers", workers),
        *more,
        ("last event", _ago(one.last_event_age_s, one_line(one.last_event))),
        ("goodput", "" if one.goodput is None else share(one.goodput, 1.0)),
        ("rows/s", "" if one.rows_per_s is None else f"{one.rows_per_s:,.0f}"),
        ("cache", _cache(one)),
    ]
    if one.checkpoint_step is not None:
        facts.append(("checkpoint", _ago(one.checkpoint_age_s, f"step {one.checkpoint_step}")))
    elif not one.is_over:
        facts.append(("checkpoint", "none yet"))
    return [(name, value) for name, value in facts if value not in ("", "-")]


def metric_fact(metrics: Mapping[str, Any]) -> tuple[str, str]:
    """Return the newest metrics besides the loss, as a fact."""
    words = [
        f"{one_line(name)} {_number(value) if isinstance(value, float) else one_line(value, 60)}"
        for name, value in metrics.items()
        if name != "loss"
    ]
    return "metrics", ", ".join(words)


def screen() -> Console:
    """Return the console of standard output."""
    return Console(highlight=False, markup=False, emoji=False)


def show(*parts: RenderableType) -> None:
    """Print in colours and as wide as the terminal; where standard output is none, as plain lines,
    which are never cut or wrapped.
    """
    out = screen()
    if out.is_terminal:
        out.print(*parts, sep="\n")
        return
    plain = Console(file=io.StringIO(), width=_ENDLESS, no_color=True, markup=False, emoji=False)
    plain.print(*parts, sep="\n", highlight=False)
    print(*(line.rstrip() for line in plain.file.getvalue().splitlines()), sep="\n")  # type: ignore[attr-defined]


def show_run(one: RunOverview, facts: Sequence[tuple[str, str]], tables: Sequence[Table]) -> None:
    """Print one run."""
    title = Text.assemble(
        (one_line(one.name), "bold"),
        ": ",
        (one.health.value, _STYLES[one.health]),
        f": {one_line(one.health_reason)}" if one.health_reason else "",
    )
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True, style="dim")
    grid.add_column(overflow="fold")
    for name, value in facts:
        grid.add_row(f"  {name}", Text(value))
    show(title, grid, *(part for table in tables for part in (Text(""), table)))


# ---------------------------------------------------------------------------------- private


def _step(one: RunOverview, of: str) -> str:
    return f"{one.step}" if one.total_steps is None else f"{one.step}{of}{one.total_steps}"


def _cache(one: RunOverview) -> str:
    read = one.cache
    if not read.total:
        return ""
    part = share(read.from_cache, read.total)
    return f"{part} of the data from disks, {_gib(read.from_cache)} that the store did not send"


def _gib(nbytes: int) -> str:
    return (
        f"{nbytes / (1 << 30):,.1f} GiB" if nbytes >= 1 << 30 else f"{nbytes / (1 << 20):,.1f} MiB"
    )


def _part(one: RunOverview) -> str:
    return f" ({share(one.step, one.total_steps)})" if one.total_steps else ""


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _ago(seconds: float | None, text: str) -> str:
    return text if seconds is None or not text else f"{text} ({duration(seconds)} ago)"
