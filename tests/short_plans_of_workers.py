"""Imported by the server from which workers are forked: all of them make short plans."""

import os

from elastic_dp.train.generations import gradual_join, state_transfer
from tests.short_plans import short_plans

_KEPT = short_plans()
_KEPT.__enter__()

if os.environ.get("ELASTIC_DP_GRADUAL_JOINS"):  # also with the small states of tests
    gradual_join.LARGE_BYTES, gradual_join.LEAST_BYTES, state_transfer.SHORT_S = 0, 2000, 0.0
