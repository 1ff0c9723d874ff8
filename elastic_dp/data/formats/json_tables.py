"""Tables that are one JSON object, as `DataFrame.to_json` writes them unless it is told otherwise.

As JSON Lines such a file is one row with a column for each value.
"""

from __future__ import annotations

import re

from elastic_dp.errors import DataError

_TEXT = rb'"(?:[^"\\]|\\.)*+"'
_COLON = rb"\s*:\s*"
_NUMBER = rb'"\d+"'  # of a row
# orient="columns", "index", "split", "table"
_LAYOUTS = (
    _TEXT + _COLON + rb"\{\s*" + _NUMBER + _COLON,
    _NUMBER + _COLON + rb"\{",
    rb'"columns"' + _COLON + rb'\[.*?\]\s*,\s*"index"' + _COLON + rb"\[",
    rb'"schema"' + _COLON + rb'\{\s*"fields"' + _COLON,
)
_TABLE = re.compile(rb"\s*\{\s*(?:" + b"|".join(_LAYOUTS) + b")", re.DOTALL)
_NEXT_ROW = re.compile(rb"\}\s*\{")


def refuse_table(name: str, content: bytes) -> None:
    """Raises DataError if `content`, the first bytes of the file `name`, begins with such a table.
    Rows that look so are followed by others."""
    if _TABLE.match(content) and not _NEXT_ROW.search(content):
        raise DataError(
            f"{name} is one JSON object that looks like a whole table, as pandas writes it by "
            "default, and would be one row; write it as "
            'to_json("rows.jsonl", orient="records", lines=True), or as Parquet'
        )
