"""The command line, `elastic-dp`. A command calls one public function and prints what it returns.

With --json, standard output is JSON and nothing else. An error is one line on standard error and
exit code 2; with --json it is {"exit_code": 2, "error": "KIND: what happened"} on standard output,
also for a wrong command line.

Modules that take long to import (ray, torch, pyarrow) are imported by the command that needs them.
"""

from __future__ import annotations

import io
import sys
from typing import Annotated, Any, NoReturn

try:
    import typer
except ModuleNotFoundError as missing:
    print(
        f"elastic-dp needs {(missing.name or '').split('.')[0]}: pip install 'elastic_dp[cli]'",
        file=sys.stderr,
    )
    raise SystemExit(2) from None

from elastic_dp.cli import (
    checkpoint_commands,
    data_commands,
    doctor_command,
    report_command,
    run_commands,
    status_command,
)
from elastic_dp.cli.run_options import print_json
from elastic_dp.cli.run_tables import one_line
from elastic_dp.errors import ElasticError, SpecError

# click's own exception for a command line that is wrong; newer typers bring a click of their own.
_UsageError: Any = typer.BadParameter.__base__


_REMOVED = {  # verb of an earlier version: what to write instead
    "list": "status",
    "top": "report RUN --live",
    "events": "logs RUN --events",
    "drain": "scale RUN --drain WORKER",
    "checkpoint": "checkpoints save RUN",
    "restart": "run JOB.py --restart",
    "kill": "scale RUN --kill WORKER",
    "ui": "report RUN --live",
}
_TUNNEL = "the page is served on this machine alone: ssh -L 8642:127.0.0.1:8642 HOST forwards it"
_REMOVED_OPTIONS = {  # (verb, option) of an earlier version
    ("checkpoints", "verify"): "use: elastic-dp checkpoints list RUN --verify",
    ("status", "--watch"): "use: watch -n 1 elastic-dp status, or report RUN --live",
    ("scale", "--min-workers"): "set it by: run JOB.py --restart --set scaling.min_workers=N",
    ("scale", "--within-s"): "a drained worker leaves once it is replaced: leave it out",
    ("stop", "--reason"): "the result says that an operator asked: leave it out",
    **{("report", option): _TUNNEL for option in ("--host", "--allow-host")},
    ("data", "--rows-per-group"): "set --row-group-bytes",
    ("data", "--csv-option"): "give the rows of a reader of CSV to write_shards, such as "
    "duckdb.sql(\"FROM read_csv('rows.csv', columns={'id': 'BIGINT', 'text': 'VARCHAR'})\")",
    ("data", "--format"): "rows become Parquet, and tokens Arrow: leave it out",
    ("data", "--compression"): "Snappy is used where it makes shards smaller: leave it out",
    ("data", "--fill-null"): "set --query 'SELECT * REPLACE (coalesce(x, 0) AS x) FROM rows'",
    ("data", "--text-glob"): "name the files by a glob in SRC, such as 'code/**/*.py'",
}


class _Verbs(typer.core.TyperGroup):
    """Prints errors that a user can fix in one line, without a traceback, or as JSON."""

    def main(self, args: Any = None, *more: Any, **settings: Any) -> Any:
        _print_what_the_terminal_lacks()
        words = list(sys.argv[1:] if args is None else args)
        as_json = "--json" in words[: words.index("--") if "--" in words else None]
        if as_json:
            settings["standalone_mode"] = False  # raises what it would print
        try:
            if words and words[0] in _REMOVED:
                now = _REMOVED[words[0]]
                raise SpecError(f"{words[0]} does not exist any more, use: elastic-dp {now}")
            for word in words:
                option = word.partition("=")[0]
                instead = _REMOVED_OPTIONS.get((words[0], option))
                if instead and (option.startswith("--") or words[1] == option):
                    raise SpecError(f"{option} does not exist any more; {instead}")
            code = super().main(args, *more, **settings)
        except ElasticError as error:
            text = one_line(error)
            if as_json:
                _fail(2, f"{type(error).__name__}: {text}")
            print(text, file=sys.stderr)
            sys.exit(2)
        except _UsageError as error:  # only with --json
            _fail(error.exit_code, f"UsageError: {error.format_message()}")
        return sys.exit(code if isinstance(code, int) else 0) if as_json else code


def _fail(code: int, error: str) -> NoReturn:
    print_json({"exit_code": code, "error": error})
    sys.exit(code)


def _print_what_the_terminal_lacks() -> None:
    """Let a terminal that is not of UTF-8 get "?" for what it cannot show, instead of an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")


_SETTINGS: dict[str, Any] = {"no_args_is_help": True, "pretty_exceptions_show_locals": False}
app = typer.Typer(cls=_Verbs, help="Elastic data-parallel training.", **_SETTINGS)
app.add_typer(data_commands.data, name="data")
app.add_typer(checkpoint_commands.checkpoints, name="checkpoints")
for _verb in (
    *(status_command.status, run_commands.run, run_commands.logs, run_commands.scale),
    *(run_commands.stop, run_commands.rewind, report_command.report, doctor_command.doctor),
):
    app.command()(_verb)


def _print_version(wanted: bool) -> None:
    if not wanted:
        return
    from importlib.metadata import PackageNotFoundError, version

    try:
        print(f"elastic_dp {version('elastic_dp')}")
    except PackageNotFoundError:
        print("elastic_dp, of a folder that is not installed")
    raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_print_version, help="Print the version."
        ),
    ] = False,
) -> None:
    """Elastic data-parallel training."""


def main() -> None:
    app()
