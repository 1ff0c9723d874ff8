"""`--storage-option NAME=VALUE` of the commands that take a URL."""

from __future__ import annotations

from typing import Annotated, Any

import typer

StorageOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=VALUE",
        help="An option of the store, as in storage_options: endpoint=http://minio:9000. May "
        "be repeated. Other users "
        "of the machine can read a command's arguments: put secrets into the environment.",
    ),
]


def storage_options(said: list[str] | None) -> dict[str, Any] | None:
    """true and false are what they say; every other value is a text."""
    options: dict[str, Any] = {}
    for each in said or ():
        name, mark, value = each.partition("=")
        if not (name and mark):
            raise typer.BadParameter(f"--storage-option {name[:8]}… must be of the form NAME=VALUE")
        options[name] = {"true": True, "false": False}.get(value.lower(), value)
    return options or None
