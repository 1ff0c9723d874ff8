"""Runs as aligned tables: in colours and as wide as the terminal, or as plain lines where standard
output is none.

Plain lines are never cut or wrapped, and hold no escape sequences. Texts of a run are printed
without control characters, which could steer the terminal.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
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
_MOST_CHARACTERS = 160  # of a text in a table of many runs


@dataclass(frozen=True, slots=True)
class TextTable:
    """Cells in rows, all of them in one line. `styles` has the style of each row's second cell."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    styles: Sequence[str] = ()

    @property
    def _widths(self) -> list[int]:
        columns = zip(self.header, *self.rows, strict=True)
        return [max(map(cell_len, column)) for column in columns]

    def lines(self) -> Iterator[str]:
        """Yield plain lines."""
        widths = self._widths
        for row in (self.header, *self.rows):
            cells = zip(row, widths, strict=True)
            yield "  ".join(cell + " " * (w - cell_len(cell)) for cell, w in cells).rstrip()

    def drawn(self, width: int) -> Table:
        """Return the table for a terminal of this width. Where it is too narrow, the first and the
        last column are wrapped.
        """
        gap = 2 if sum(self._widths) + 2 * len(self.header) <= width else 1
        table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="bold")
        for name in self.header:
            ends = name in (self.header[0], self.header[-1])
            table.add_column(name, no_wrap=not ends, overflow="fold")
        for number, row in enumerate(self.rows):
            style = self.styles[number] if self.styles else ""
            texts = [Text(cell, style if at == 1 else "") for at, cell in enumerate(row)]
            table.add_row(*texts)
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


def overview_table(overviews: Sequence[RunOverview]) -> TextTable:
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
    return TextTable(header, rows, [_STYLES[one.health] for one in overviews])


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


def drawn_run(
    one: RunOverview, facts: Sequence[tuple[str, str]], tables: Sequence[TextTable], width: int
) -> RenderableType:
    """Return one run for a terminal."""
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
    parts: list[RenderableType] = [title, grid]
    for table in tables:
        parts += [Text(""), table.drawn(width)]
    return Group(*parts)


def plain_run(
    one: RunOverview, facts: Sequence[tuple[str, str]], tables: Sequence[TextTable]
) -> Iterator[str]:
    """Yield one run as plain lines."""
    reason = f": {one_line(one.health_reason)}" if one.health_reason else ""
    yield f"{one_line(one.name)}: {one.health.value}{reason}"
    width = max((len(name) for name, _ in facts), default=0)
    for name, value in facts:
        yield f"  {name:<{width}}  {value}"
    for table in tables:
        yield ""
        yield from table.lines()


def screen() -> Console:
    """Return the console of standard output."""
    return Console(highlight=False, markup=False, emoji=False)


def print_table(table: TextTable) -> None:
    out = screen()
    if out.is_terminal:
        out.print(table.drawn(out.width))
    else:
        print(*table.lines(), sep="\n")


def print_run(
    one: RunOverview, facts: Sequence[tuple[str, str]], tables: Sequence[TextTable]
) -> None:
    out = screen()
    if out.is_terminal:
        out.print(drawn_run(one, facts, tables, out.width))
    else:
        print(*plain_run(one, facts, tables), sep="\n")


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
