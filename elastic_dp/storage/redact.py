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
from urllib.parse import quote

from elastic_dp.urls import redact_url

HIDDEN = "***"
_PUBLIC = {
    *(
        "endpoint_url",
        "endpoint",
        "region_name",
        "region",
        "project",
        "account_name",
        "account_host",
    ),
    *("aws_endpoint_url", "aws_endpoint", "aws_region", "aws_default_region", "account_url"),
    *("protocol", "target_protocol", "addressing_style", "signature_version", "access", "host"),
}
_SECRET_PARTS = {"AccountKey", "SharedAccessSignature"}
_SHORTEST_SECRET = 4  # removing shorter values would make messages unreadable
_SECRET_VARIABLE = re.compile(r"SECRET|TOKEN|PASSWORD|ACCOUNT_KEY|SAS_KEY|ACCESS_KEY")
_ECHOED = re.compile(
    r"(?i)(bearer\s+|(?:authorization|x-amz-security-token|signature|credential)\s*[=:]\s*)[^\s,;&<>'\"]+"
)
_XML_ERROR = re.compile(
    r"<Error>.*?<Code>(.*?)</Code>(?:.*?<Message>(.*?)</Message>)?.*", re.DOTALL
)


def redact(text: str, options: Mapping[str, Any]) -> str:
    text = _XML_ERROR.sub(_code_and_message, text)
    for secret in sorted(_secrets(options), key=len, reverse=True):
        text = text.replace(secret, HIDDEN).replace(quote(secret, safe=""), HIDDEN)
    return _ECHOED.sub(rf"\1{HIDDEN}", redact_url(text))


def _code_and_message(error: re.Match[str]) -> str:
    """Returns code and message of S3's XML. The rest repeats the signed request with its token."""
    return f"{error[1]}: {error[2]}" if error[2] else error[1]


def _secrets(options: Mapping[str, Any]) -> set[str]:
    variables = (v for k, v in os.environ.items() if _SECRET_VARIABLE.search(k))
    return {
        line
        for value in (*_values(options), *variables)
        for line in (value, value.encode("unicode_escape").decode())
        if len(line) >= _SHORTEST_SECRET
    }


def _values(value: Any, name: str = "") -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _values(inner, str(key))
    elif isinstance(value, list | tuple | set):
        for inner in value:
            yield from _values(inner, name)
    elif isinstance(value, bytes):
        yield value.decode("utf-8", "replace")
    elif isinstance(value, str) and name.lower() not in _PUBLIC:
        yield value
        if name.lower() == "connection_string":  # Azure's: a store is told its parts
            named = (part.partition("=") for part in value.split(";"))
            yield from (said for key, _, said in named if key in _SECRET_PARTS)
