"""URLs with the options of their store, and URLs for logs: without user, password and query, any of
which may be a credential.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_USERINFO = re.compile(r"(?<!abfs)(?<!abfss)(://)[^/\s@'\"]*@")  # in abfs URLs it is the container
# A password with an unescaped "/". Not "host:9000/a@b", "arn:aws:s3:…" or a chained URL.
_UNESCAPED = re.compile(
    r"(?<!abfs)(?<!abfss)(://)(?!arn:)[^/\s@'\":\[]*:(?!:|\d{1,5}/)[^\s@'\"]*/[^\s@'\"]*@"
)
_QUERY = re.compile(r"(https?://[^\s'\"?<>]*)\?[^\s'\"<>)\]]*")
# In other URLs a "?" may belong to a glob.
_QUERY_ELSEWHERE = re.compile(r"(://[^\s'\"?<>]*)\?[\w.~-]+=[^\s'\"<>)\]]*")


class StorageURL(str):
    """A URL together with the options of its store, which `Store` opens it with.

    A run's folder is handed from the driver to the controller and the workers as one of these. It
    is a text, so whatever is written, compared or printed is the URL alone; only a pickle, which
    stays in memory and on the wire, holds the options.
    """

    options: Mapping[str, Any]

    def __new__(cls, url: str, options: Mapping[str, Any] | None = None) -> StorageURL:
        self = super().__new__(cls, url)
        self.options = dict(options or {})
        return self


def redact_url(text: str) -> str:
    """Return `text`, a URL or a text that contains URLs, without credentials."""
    for credentials in (_USERINFO, _UNESCAPED, _QUERY, _QUERY_ELSEWHERE):
        text = credentials.sub(r"\1", text)
    return text
