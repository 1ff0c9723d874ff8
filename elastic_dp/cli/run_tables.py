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
                _age((one.get("newest_checkpoint") or {}).get("age_s")),
                _age(event_age_s),
                one_line(text or one["health_reason"], _MOST_CHARACTERS),
            )
        )
    return text_table(header, rows)


def run_text(one: Mapping[str, Any]) -> str:
    """Return one run: its health, what is known of it, what matters first, and its workers."""
    facts = [(name, value) for name, value in _facts(one) if value not in ("", "-")]
    reason = f": {one_line(one['health_reason'])}" if one["health_reason"] else ""
    width = max((len(name) for name, _ in facts), default=0)
    lines = [f"{one_line(one['name'])}: {one['health']}{reason}"]
    lines += [f"  {name.ljust(width)}  {value}" for name, value in facts]
    processes, nothing = one.get("processes", {}), {"pid": "-", "node": "-"}
    rows = [
        tuple(map(one_line, (name, stage, *processes.get(name, nothing).values())))
        for name, stage in one.get("workers", {}).items()
    ]
    return "\n".join(
        [*lines, *(["", text_table(("worker", "stage", "pid", "node"), rows)] if rows else ())]
    )


# ---------------------------------------------------------------------------------- private


def _facts(one: Mapping[str, Any]) -> list[tuple[str, str]]:
    number, total, goodput = one.get("generation", 0), one.get("max_steps"), one.get("goodput")
    workers = f"generation {number}"
    if not is_over(one):
        workers = f"{one.get('world_size', 0)} of {one.get('size', 0)}, {workers}"
    elif not number:  # it never had a group of workers, or was trained in one process
        workers = ""
    text, event_age_s = _newest_event(one)
    rows_per_s, checkpoint = one.get("rows_per_s"), one.get("newest_checkpoint")
    saved = "" if is_over(one) else "none yet"
    if checkpoint is not None:
        saved = _ago(checkpoint["age_s"], f"step {checkpoint['step']}")
    metrics = [
        f"{one_line(name)} {_number(value) if isinstance(value, float) else one_line(value, 60)}"
        for name, value in one.get("metrics", {}).items()
        if name != "loss" and value is not None
    ]
    lost, back = one.get("lost", 0), one.get("rollbacks", 0)
    went_back = f", and {counted(back, 'time')} back to a checkpoint" if back else ""
    waits, started_s = one.get("waits_for"), one.get("started_age_s")
    phase = f"{one.get('phase')}: {one_line(one.get('reason', ''))}"
    return [
        ("step", _step(one, " of ") + (f" ({share(one['step'], total)})" if total else "")),
        ("loss", _number(loss_of(one))),
        ("workers", workers),
        ("phase", "" if "report" in one else phase),
        ("metrics", ", ".join(metrics)),
        *(("not exact", one_line(why)) for why in one.get("inexact_because", ())),
        ("sharding", one_line(one.get("sharding") or "")),
        ("waits for", f"a node: {one_line(waits)}" if waits else ""),
        ("lost", counted(lost, "worker") + went_back if lost or back else ""),
        ("started", "" if started_s is None else f"{duration(started_s)} ago"),
        ("last event", _ago(event_age_s, one_line(text))),
        ("goodput", "" if goodput is None else share(goodput, 1.0)),
        ("rows/s", "" if rows_per_s is None else f"{rows_per_s:,.0f}"),
        ("checkpoint", saved),
    ]


def _step(one: Mapping[str, Any], of: str) -> str:
    total = one.get("max_steps")
    return f"{one.get('step', 0)}" + ("" if total is None else f"{of}{total}")


def _newest_event(one: Mapping[str, Any]) -> tuple[str, float | None]:
    event = one.get("newest_event") or {}
    return str(event.get("text") or one.get("reason", "")), event.get("age_s")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _age(seconds: float | None) -> str:
    return "-" if seconds is None else duration(seconds)


def _ago(seconds: float | None, text: str) -> str:
    return text if seconds is None or not text else f"{text} ({duration(seconds)} ago)"
