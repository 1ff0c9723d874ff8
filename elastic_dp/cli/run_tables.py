"""Runs as aligned tables of plain lines.

Lines are never cut or wrapped. Texts of a run are printed without control characters, which could
steer the terminal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from elastic_dp.report.run_status import Health, loss_of
from elastic_dp.report.verdict import duration, share

_MOST_CHARACTERS = 160  # of a text in a table of many runs


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of cells in one line each, below their header."""
    lines = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = ("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)
    return "\n".join(padded)


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


def is_over(status: Mapping[str, Any]) -> bool:
    return status["health"] in (Health.FINISHED, Health.FAILED)


def overview_table(statuses: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of `status`: what matters first."""
    header = ("run", "health", "step", "loss", "workers", "goodput", "saved", "age", "last event")
    rows = []
    for one in statuses:
        text, event_age_s = _newest_event(one)
        goodput = one.get("goodput")
        rows.append(
            (
                one_line(one["name"]),
                one["health"],
                _step(one, "/"),
                _number(loss_of(one)),
                "-" if is_over(one) else f"{one.get('world_size', 0)}/{one.get('size', 0)}",
                "-" if goodput is None else share(goodput, 1.0),
                age((one.get("newest_checkpoint") or {}).get("age_s")),
                age(event_age_s),
                one_line(text or one["health_reason"], _MOST_CHARACTERS),
            )
        )
    return text_table(header, rows)


def overview_facts(
    one: Mapping[str, Any], more: Sequence[tuple[str, str]] = ()
) -> list[tuple[str, str]]:
    """Return one run as (name, value), what matters first. `more` follows the workers."""
    number, total, goodput = one.get("generation", 0), one.get("max_steps"), one.get("goodput")
    workers = f"generation {number}"
    if not is_over(one):
        workers = f"{one.get('world_size', 0)} of {one.get('size', 0)}, {workers}"
    elif not number:  # it never had a group of workers, or was trained in one process
        workers = ""
    text, event_age_s = _newest_event(one)
    rows_per_s, checkpoint = one.get("rows_per_s"), one.get("newest_checkpoint")
    facts = [
        ("step", _step(one, " of ") + (f" ({share(one['step'], total)})" if total else "")),
        ("loss", _number(loss_of(one))),
        ("workers", workers),
        *more,
        ("started", "" if (ago_s := one.get("started_age_s")) is None else f"{age(ago_s)} ago"),
        ("last event", _ago(event_age_s, one_line(text))),
        ("goodput", "" if goodput is None else share(goodput, 1.0)),
        ("rows/s", "" if rows_per_s is None else f"{rows_per_s:,.0f}"),
    ]
    if checkpoint is not None:
        facts.append(("checkpoint", _ago(checkpoint["age_s"], f"step {checkpoint['step']}")))
    elif not is_over(one):
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


def run_table(
    one: Mapping[str, Any], facts: Sequence[tuple[str, str]], tables: Sequence[str]
) -> str:
    """Return one run: its health, what is known of it, and the tables."""
    reason = f": {one_line(one['health_reason'])}" if one["health_reason"] else ""
    width = max((len(name) for name, _ in facts), default=0)
    lines = [f"{one_line(one['name'])}: {one['health']}{reason}"]
    lines += [f"  {name.ljust(width)}  {value}" for name, value in facts]
    return "\n".join([*lines, *(f"\n{table}" for table in tables)])


# ---------------------------------------------------------------------------------- private


def _step(one: Mapping[str, Any], of: str) -> str:
    total = one.get("max_steps")
    return f"{one.get('step', 0)}" + ("" if total is None else f"{of}{total}")


def _newest_event(one: Mapping[str, Any]) -> tuple[str, float | None]:
    event = one.get("newest_event") or {}
    return str(event.get("text") or one.get("reason", "")), event.get("age_s")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _ago(seconds: float | None, text: str) -> str:
    return text if seconds is None or not text else f"{text} ({duration(seconds)} ago)"
