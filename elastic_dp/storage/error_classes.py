"""What a foreign exception means: retry it, retry it a few times, or raise it. The only place that
knows.

Libraries are recognised by the names of their exceptions, so none has to be installed. What is not
recognised is final: retrying for ever what can never work hides it from the user.
"""

from __future__ import annotations

import errno
import re
from dataclasses import dataclass
from enum import Enum

from elastic_dp.errors import StorageError


class ObjectMissing(StorageError, FileNotFoundError):
    """There is no such object. Example: a shard that was deleted after the index was read."""


class ObjectRewritten(StorageError):
    """The object is not the one that was asked for. Example: a shard that was uploaded again, or
    cut short, meanwhile."""


class OtherVersion(Exception):
    """Internal: the store answered with another version than the one asked for, or with fewer bytes
    than that had."""


class ShortBody(Exception):
    """Internal: fewer bytes came than the object has."""


class Kind(Enum):
    TRANSIENT = "may pass by itself"
    OTHER_VERSION = "a stale copy, or the object was rewritten"
    MISSING = "no such object"
    EXISTS = "the object exists"
    PERMANENT = "needs somebody to act"


@dataclass(frozen=True)
class Fault:
    kind: Kind
    words: str  # the store's own, not yet redacted


_TRANSIENT_STATUS = {408, 425, 429, 500, 502, 503, 504, 507, 509, 520, 522, 524, 529}
_TRANSIENT_NAMES = {
    *("TimeoutError", "ConnectionError", "HTTPClientError", "IncompleteRead", "ShortBody"),
    *("ClientConnectionError", "ClientPayloadError", "ResponseParserError", "JoinError"),
}
_TRANSIENT_ERRNO = {
    *(errno.EIO, errno.ESTALE, errno.EAGAIN, errno.EINTR, errno.ENETDOWN, errno.ENETUNREACH),
    *(errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.EREMOTEIO),
    *(errno.ENOSPC, errno.EDQUOT),  # as 507: somebody may make room
}
_TRANSIENT_CODES = {
    *("RequestTimeout", "SlowDown", "InternalError", "ServiceUnavailable", "Throttling"),
    *("ConditionalRequestConflict", "OperationAborted"),  # 409 of S3; of Azure, 409 is "exists"
}
_FINAL_NAMES = {"PermissionDeniedError", "UnauthenticatedError", "NotSupportedError"}
_STATUS = re.compile(r"status code: (\d{3})")
# obstore asks the machine's own service where it found no other credentials.
_NO_CREDENTIALS = "169.254.169.254"
# After this it says everything again, in Rust.
_DEBUG = "\n\nDebug source:"


def fault_of(error: Exception) -> Fault:
    if isinstance(error, StorageError):
        return Fault(Kind.PERMANENT, str(error))
    words = str(error).split(_DEBUG)[0].strip() or type(error).__name__
    if _NO_CREDENTIALS in words:
        words += " (no credentials were found in storage_options or the environment)"
    status = _status(error)
    return Fault(_kind(error, status), _say(error, words, status))


def _kind(error: Exception, status: int | None) -> Kind:
    names = _names(error)
    past_its_end = status == 416 or "Wanted range starting at" in str(error)  # as obstore says it
    if isinstance(error, OtherVersion) or past_its_end:
        return Kind.OTHER_VERSION
    if status in _TRANSIENT_STATUS:
        return Kind.TRANSIENT
    if status in (404, 410) or (isinstance(error, FileNotFoundError) and status is None):
        return Kind.MISSING
    if isinstance(error, PermissionError) or names & _FINAL_NAMES:
        return Kind.PERMANENT
    if any(code in str(error) for code in _TRANSIENT_CODES):
        return Kind.TRANSIENT
    if isinstance(error, FileExistsError) or "AlreadyExistsError" in names:
        return Kind.EXISTS
    if status is not None:
        return Kind.PERMANENT
    return Kind.TRANSIENT if _connection_failed(error, names) else Kind.PERMANENT


def _connection_failed(error: Exception, names: set[str]) -> bool:
    text = str(error)
    if "certificate" in text:
        return False
    if "GenericError" in names:  # obstore's, without a status
        return ": HTTP error:" in text or "- HTTP error:" in text
    if names & _TRANSIENT_NAMES:
        return True
    return isinstance(error, OSError) and error.errno in _TRANSIENT_ERRNO


def _names(error: BaseException) -> set[str]:
    return {cls.__name__ for cls in type(error).__mro__}


def _status(error: Exception) -> int | None:
    """The HTTP status, where a library tells."""
    found = _STATUS.search(str(error))
    status = int(found[1]) if found else getattr(error, "status", None)
    return status if isinstance(status, int) and 300 <= status < 600 else None


def _say(error: Exception, words: str, status: int | None) -> str:
    name = type(error).__name__
    shown = "" if status is None or str(status) in words else f"{status} "
    return (
        f"{shown}{words}"
        if name in {"GenericError", "OtherVersion", "ShortBody"}
        else f"{name}: {shown}{words}"
    )
