"""Removes credentials from texts: known values, URL userinfo and queries, and echoes of signed
requests.

The value of an option is a secret unless its name is known to be harmless. An unknown name counts
as a secret.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from elastic_dp.urls import redact_url

HIDDEN = "***"
_PUBLIC = re.compile(
    r"(?i)(aws_)?(endpoint(_url)?|(default_)?region(_name)?)|account_(name|host|url)|profile|project"
    r"|(target_)?protocol|addressing_style|signature_version|access|host"
)
_SECRET_PARTS = {"AccountKey", "SharedAccessSignature"}
_SHORTEST = 4  # of a secret
_SHORTEST_UNNAMED = 8  # shorter values of other options are words such as "false"
_SHORTEST_IN_WORD = 16  # shorter secrets are whole words
_WORD_BEGINS = r"(?:(?<!\w)|(?<=%[0-9A-Fa-f]{2})|(?<=\\n))"
_SECRET_NAME = re.compile(
    r"(?i)(?:^|_)(?:secret|token|password|key|key_id|credentials?|connection_string)$"
)
_ECHOED = re.compile(
    r"(?i)((?:bearer|basic)\s+|(?:authorization|x-amz-security-token|signature|credential)\s*[=:]\s*"
    r"(?:(?:bearer|basic)\s+)?)[^\s,;&<>'\"]+"
)
_XML_ERROR = re.compile(
    r"<Error>.*?<Code>(.*?)</Code>(?:.*?<Message>(.*?)</Message>)?.*", re.DOTALL
)


def redact(text: str, options: Mapping[str, Any]) -> str:
    text = _XML_ERROR.sub(_code_and_message, text)
    for secret in sorted(_secrets(options), key=len, reverse=True):
        for form in {secret, quote(secret, safe=""), secret.encode("unicode_escape").decode()}:
            is_word = len(secret) < _SHORTEST_IN_WORD
            begins = _WORD_BEGINS if is_word and form[0].isalnum() else ""
            ends = r"(?!\w)" if is_word and form[-1].isalnum() else ""
            text = re.sub(begins + re.escape(form) + ends, HIDDEN, text)
    return _ECHOED.sub(rf"\1{HIDDEN}", redact_url(text))


def url_credentials(url: str) -> list[str]:
    """Return user, password and the values of the query, as they are in the URL and unquoted."""
    try:
        parts = urlsplit(url)
    except ValueError:  # it will not open
        return []
    user = "" if parts.scheme in ("abfs", "abfss") else parts.netloc.rpartition("@")[0]
    found = [*user.split(":"), *(part.partition("=")[2] for part in parts.query.split("&"))]
    return [form for text in found for form in (text, unquote(text))]


def _code_and_message(error: re.Match[str]) -> str:
    """Returns code and message of S3's XML. The rest repeats the signed request with its token."""
    return f"{error[1]}: {error[2]}" if error[2] else error[1]


def _secrets(options: Mapping[str, Any]) -> set[str]:
    named = {name: value for name, value in os.environ.items() if _SECRET_NAME.search(name)}
    variables = (value for value in _values(named) if len(value) >= _SHORTEST_UNNAMED)
    return {*_values(options), *variables}


def _values(value: Any, name: str = "") -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _values(inner, str(key))
    elif isinstance(value, list | tuple | set):
        for inner in value:
            yield from _values(inner, name)
    elif isinstance(value, bytes):
        yield from _values(value.decode("utf-8", "replace"), name)
    elif isinstance(value, str) and not _PUBLIC.fullmatch(name):
        for text in {value, value.rpartition(" ")[2]}:  # of "Bearer TOKEN"
            if len(text) >= (_SHORTEST if _SECRET_NAME.search(name) else _SHORTEST_UNNAMED):
                yield text
        if name.lower().endswith("connection_string"):  # Azure's: a store gets its parts
            named = (part.partition("=") for part in value.split(";"))
            yield from (text for key, _, text in named if key in _SECRET_PARTS)
