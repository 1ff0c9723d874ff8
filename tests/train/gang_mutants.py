"""Each guard of workers of several processes, taken out, and the test that then fails.

As a plugin of pytest (`-p tests.train.gang_mutants`) this module takes out the guard that the
environment variable GANG_MUTANT names, before anything imports it.
"""

from __future__ import annotations

import os

from tests.module_mutants import ModuleMutant, take_out, take_out_in_workers

CHANNEL = "elastic_dp.train.gang.process_channel"
CHANNEL_TESTS = "tests/train/gang/test_process_channel.py"
RUN_TESTS = "tests/train/test_gangs.py"
REFUSED = f"{RUN_TESTS}::test_job_that_cannot_run_ends_with_its_error"
SAME_ROWS = f"{RUN_TESTS}::test_gang_trains_as_one_process_does_on_the_same_rows"

GANG_MUTANTS = [
    ModuleMutant(
        "the loss of a process is told as a failure of user code",
        "LeaderChannel._failed",
        "self.confirm()",
        "None",
        module=CHANNEL,
        caught_by=(
            f"{CHANNEL_TESTS}::"
            "test_failure_of_one_process_is_passed_on_once_all_have_shown_that_they_live"
        ),
    ),
    ModuleMutant(
        "processes at different points are taken for one at the same",
        "LeaderChannel.gather",
        "message.point != point",
        "False",
        module=CHANNEL,
        caught_by=f"{CHANNEL_TESTS}::test_process_at_another_point_is_an_error_that_says_what_to_do",
    ),
    ModuleMutant(
        "each process knows of its own results of an evaluation",
        "_complete",
        "session.control.exchange(_packed(known))",
        "[_packed(known)]",
        module="elastic_dp.train.step.evaluation",
        caught_by=(
            f"{RUN_TESTS}::"
            "test_evaluation_goes_on_where_one_process_had_heard_all_and_another_had_not"
        ),
        is_slow=True,
    ),
    ModuleMutant(
        "the orders in which processes get gradients are not compared",
        "record_of_gang",
        "len({one[:len(digest)] for one in told}) > 1",
        "False",
        module="elastic_dp.train.step.gang_step",
        caught_by=f"{REFUSED}[other_layers_for_other_rows-runs other layers for other rows]",
        is_slow=True,
    ),
    ModuleMutant(
        "a parameter that nobody averages is taken for one of fully_shard",
        "check_gang",
        "p not in gathered",
        "False",
        module="elastic_dp.train.gang.gang_checks",
        caught_by=f"{REFUSED}[partly_replicated-1.bias is a DTensor over ctx.mesh, but not one of]",
        is_slow=True,
    ),
    ModuleMutant(
        "the processes of a worker have the same rows",
        "ProcessBatches._key",
        "virtual_worker * self._size + self._number",
        "virtual_worker * self._size",
        module="elastic_dp.train.step.process_batches",
        caught_by=SAME_ROWS,
    ),
    ModuleMutant(
        "the processes of a worker draw the same random numbers",
        "Gang.key",
        "virtual_worker * self.size + self.number",
        "virtual_worker * self.size",
        module="elastic_dp.train.gang.gang",
        caught_by=SAME_ROWS,
    ),
]

NAMED = os.environ.get("GANG_MUTANT")
if NAMED is not None:
    take_out(next(one for one in GANG_MUTANTS if one.name == NAMED))
    take_out_in_workers(__name__)
