"""Runs as aligned tables of plain lines.

Lines are never cut or wrapped. Texts of a run are printed without control characters, which could
steer the terminal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from elastic_dp.report.run_status import Health, loss_of
from elastic_dp.wording import counted, duration, share

_MOST_CHARACTERS = 160  # of a text in a table of many runs
_COLUMNS = ("step", "loss", "workers", "goodput", "saved", "age", "last event")


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of cells in one line each, below their header."""
    lines = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = ("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)
    return "\n".join(padded)


def printable(text: str) -> str:
    """Return a text of several lines without other control characters."""
    return "".join(c if c.isprintable() or c == "\n" else " " for c in text)


def one_line(value: Any, most: int | None = None) -> str:
    """Return a text in one line, without control characters. `most`: of its characters."""
    text = " ".join(printable(str(value)).split())
    return text if most is None or len(text) <= most else text[: most - 1] + "…"


def overview_table(statuses: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of `status`: what matters first."""
    rows = []
    for one in statuses:
        facts = _facts(one)
        facts["last event"] = one_line(
            facts["last event"] or one["health_reason"], _MOST_CHARACTERS
        )
        cells = (facts[column] or "-" for column in _COLUMNS)
        rows.append((one_line(one["name"]), one["health"], *cells))
    return text_table(("run", "health", *_COLUMNS), rows)


def run_text(one: Mapping[str, Any]) -> str:
    """Return one run: its health, what is known of it, and its workers."""
    facts = {name: value for name, value in (_facts(one) | _details(one)).items() if value}
    reason = f": {one_line(one['health_reason'])}" if one["health_reason"] else ""
    width = max(map(len, facts), default=0)
    lines = [f"{one_line(one['name'])}: {one['health']}{reason}"]
    lines += [f"  {name.ljust(width)}  {value}" for name, value in facts.items()]
    processes, nothing = one.get("processes", {}), {"pid": "-", "node": "-"}
    rows = [
        tuple(map(one_line, (name, stage, *processes.get(name, nothing).values())))
        for name, stage in one.get("workers", {}).items()
    ]
    return "\n".join(
        [*lines, *(["", text_table(("worker", "stage", "pid", "node"), rows)] if rows else ())]
    )


# ---------------------------------------------------------------------------------- private


def _facts(one: Mapping[str, Any]) -> dict[str, str]:
    """Return what is known of a run, by column. "": nothing."""
    is_over = one["health"] in (Health.FINISHED, Health.FAILED)
    total, goodput, loss = one.get("max_steps"), one.get("goodput"), loss_of(one)
    saved, event = one.get("newest_checkpoint") or {}, one.get("newest_event") or {}
    return {
        "step": f"{one.get('step', 0)}" + ("" if total is None else f"/{total}"),
        "loss": "" if loss is None else f"{loss:.4g}",
        "workers": "" if is_over else f"{one.get('world_size', 0)}/{one.get('size', 0)}",
        "goodput": "" if goodput is None else share(goodput, 1.0),
        "saved": _age(saved),
        "age": _age(event),
        "last event": one_line(event.get("text") or one.get("reason", "")),
    }


def _details(one: Mapping[str, Any]) -> dict[str, str]:
    """Return what a run alone is shown with."""
    saved, number, waits_for = (
        one.get(name) for name in ("newest_checkpoint", "generation", "waits_for")
    )
    metrics = [
        f"{one_line(name)} {value:.4g}"
        if isinstance(value, float)
        else f"{one_line(name)} {one_line(value, 60)}"
        for name, value in one.get("metrics", {}).items()
        if name != "loss" and value is not None
    ]
    return {
        "phase": ""
        if "report" in one
        else f"{one.get('phase')}: {one_line(one.get('reason', ''))}",
        "generation": str(number) if number else "",
        "checkpoint": f"step {saved['step']}" if saved else "",
        "metrics": ", ".join(metrics),
        "not exact": one_line("; ".join(one.get("inexact_because", ()))),
        "waits for": f"a node: {one_line(waits_for)}" if waits_for else "",
        "lost": counted(one["lost"], "worker") if one.get("lost") else "",
    }


def _age(of: Mapping[str, Any]) -> str:
    return "" if of.get("age_s") is None else duration(of["age_s"])
