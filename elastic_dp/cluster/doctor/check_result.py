"""The result of one check: what was found, whether it will do, and what to do if not."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class CheckLevel(StrEnum):
    """How bad it is."""

    OK = "ok"
    WARNING = "warning"  # a run works, but slowly, or it recovers slowly
    FAILS = "fails"  # a run will not work


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One line of the doctor. `where` is the node; "" is this machine or all nodes."""

    check: str
    level: CheckLevel
    text: str
    way_out: str = ""
    where: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"level": self.level.value}


def ok(check: str, text: str, where: str = "") -> CheckResult:
    return CheckResult(check, CheckLevel.OK, text, "", where)


def warning(check: str, text: str, way_out: str, where: str = "") -> CheckResult:
    return CheckResult(check, CheckLevel.WARNING, text, way_out, where)


def fails(check: str, text: str, way_out: str, where: str = "") -> CheckResult:
    return CheckResult(check, CheckLevel.FAILS, text, way_out, where)
