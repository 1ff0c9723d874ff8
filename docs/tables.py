"""Write the tables of the documentation that come from the code and from measured results.

python -m docs.tables    # docs/reference.md, docs/benchmarks.md, tables of README.md and k8s/docs
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import typer

import elastic_dp as edp
from benchmarks import results_page
from elastic_dp import cli
from elastic_dp.cluster.controller.prometheus_metrics import METRICS
from elastic_dp.integrations import lightning, transformers

PAGE = Path(__file__).parent / "reference.md"
CONFIGS = (
    edp.DataConfig,
    edp.MapStyleData,
    edp.ScalingConfig,
    edp.CheckpointConfig,
    edp.FailureConfig,
)


def table(head: str, rows: Iterable[Iterable[str]]) -> str:
    lines = [head, "|" + "---|" * (head.count("|") - 1)]
    lines += [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows]
    return "\n".join(lines) + "\n"


def options(config: Any) -> Iterator[tuple[str, str, str]]:
    """The options of a class of settings, with their defaults, as its docstring describes them."""
    found = re.findall(r"^- ((?:`\w+`(?:,\s+)?)+): (.*?)(?=\n- |\n\n|\Z)", doc(config), re.M | re.S)
    fields = {field.name: field for field in dataclasses.fields(config)}
    for names, text in found:
        listed = re.findall(r"`(\w+)`", names)
        defaults = list(dict.fromkeys(default(fields[name]) for name in listed))
        yield names, ", ".join(defaults) if len(defaults) == 1 else "", " ".join(text.split())


def default(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        return f"`{field.default!r}`"
    if field.default_factory is not dataclasses.MISSING:
        return f"`{field.default_factory()!r}`"
    return "required"


def doc(thing: Any) -> str:
    return "\n".join(line.removeprefix("    ") for line in (thing.__doc__ or "").splitlines())


def commands(group: Any, words: str) -> Iterator[tuple[str, str, str]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{words} {name}")
            continue
        given = " ".join(one.name.upper() for one in command.params if one.opts[0][0] != "-")
        flags = " ".join(f"`{one.opts[0]}`" for one in command.params if one.opts[0][0] == "-")
        text = " ".join((command.help or "").partition("\n\n")[0].split())
        yield f"`{words} {name} {given}`".replace(" `", "`"), text, flags


def metrics() -> Iterator[tuple[str, str, str, str]]:
    for kind in METRICS:
        label = f"`{kind.label}`: {', '.join(kind.values)}" if kind.label else ""
        yield f"`ray_{kind.name}`", "histogram" if kind.bounds else "gauge", label, kind.help


def arguments(accepted: Iterable[str], rest: str, remedies: Mapping[str, str]) -> Iterator[str]:
    yield f"Accepted: {names(accepted)}.\n"
    yield f"Any other is refused{rest}. Leave it out, except for these:\n"
    yield table("| name | what to do |", ((f"`{k}`", v) for k, v in sorted(remedies.items())))


def names(listed: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(listed))


def page() -> str:
    parts = [
        "# Reference\n",
        "`python -m docs.tables` writes this page from the code. The [API reference](api.md) has "
        "classes and methods.\n",
    ]
    for config in CONFIGS:
        parts += [
            f"## {config.__name__}\n",
            table("| option | default | what it does |", options(config)),
        ]
    parts += ["## Commands\n", "With `--help` a command explains its options.\n"]
    app = typer.main.get_command(cli.app)
    parts += [table("| command | what it does | options |", commands(app, "elastic-dp"))]
    parts += [
        "## Metrics\n",
        "Each metric has the label `run`, the name of the run.\n",
        table("| name | kind | another label | what |", metrics()),
        "## Fields of TrainingArguments\n",
        *arguments(transformers.ACCEPTED, " unless it has its default", transformers.REMEDIES),
        "## Arguments of Lightning's Trainer\n",
        *arguments(lightning.USED, "", lightning.REMEDIES),
    ]
    return "\n".join(parts)


def main() -> None:
    PAGE.write_text(page())
    results_page.PAGE.write_text(results_page.page())
    results_page.README.write_text(results_page.readme())
    results_page.KUBERNETES.write_text(results_page.kubernetes())


if __name__ == "__main__":
    main()
