"""Imported by the server from which workers are forked: all of them make short plans."""

from tests.short_plans import short_plans

_KEPT = short_plans()
_KEPT.__enter__()
