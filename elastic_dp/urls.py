"""Redacts URLs for logs: without user, password and query, any of which may be a credential."""

from __future__ import annotations

import re

_USERINFO = re.compile(r"(?<!abfs)(?<!abfss)(://)[^/\s@'\"]*@")  # in abfs URLs it is the container
_QUERY = re.compile(r"(https?://[^\s'\"?<>]*)\?[^\s'\"<>)\]]*")
# In other URLs a "?" may belong to a glob.
_QUERY_ELSEWHERE = re.compile(r"(://[^\s'\"?<>]*)\?[\w.~-]+=[^\s'\"<>)\]]*")


def redact_url(text: str) -> str:
    """Return `text`, a URL or a text that contains URLs, without credentials."""
    return _QUERY_ELSEWHERE.sub(r"\1", _QUERY.sub(r"\1", _USERINFO.sub(r"\1", text)))
