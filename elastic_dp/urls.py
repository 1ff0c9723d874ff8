"""URLs as they may be said: without user, password and query, any of which may be a credential."""

from __future__ import annotations

import re

_USERINFO = re.compile(r"(?<!abfs)(?<!abfss)(://)[^/\s@'\"]*@")  # of abfs it is the container
_QUERY = re.compile(r"(https?://[^\s'\"?<>]*)\?[^\s'\"<>)\]]*")
# There "?" may be a glob's.
_QUERY_ELSEWHERE = re.compile(r"(://[^\s'\"?<>]*)\?[\w.~-]+=[^\s'\"<>)\]]*")


def redact_url(text: str) -> str:
    """A URL, or a text with URLs in it."""
    return _QUERY_ELSEWHERE.sub(r"\1", _QUERY.sub(r"\1", _USERINFO.sub(r"\1", text)))
