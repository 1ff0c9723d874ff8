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
AS_ONE = (
    "tests/train/gang/test_parallelisms.py::"
    "test_gang_trains_as_one_process_does_on_the_same_rows[{}]"
)
SAME_ROWS = AS_ONE.format("fully_shard")
SAME_POSITIONS = AS_ONE.format("tensor_parallel")
PARTS_OF_POSITIONS = AS_ONE.format("context_parallel")
TP_TESTS = "tests/train/test_tensor_parallel.py"
REFUSED_TP = f"{TP_TESTS}::test_job_that_cannot_run_with_the_same_rows_ends_with_its_error"

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
        "_check_fully_sharded",
        "p not in gathered",
        "False",
        module="elastic_dp.train.gang.gang_checks",
        caught_by=(
            f"{REFUSED}[partly_sharded_by_hand-1.bias is a DTensor over ctx.mesh, but not one of]"
        ),
        is_slow=True,
    ),
    ModuleMutant(
        "the processes of a worker have the same rows",
        "ProcessBatches.batch",
        "self._key(virtual_worker)",
        "virtual_worker",
        module="elastic_dp.train.step.process_batches",
        caught_by=SAME_ROWS,
    ),
    ModuleMutant(
        "the processes of a worker draw the same random numbers",
        "MicroBatchRunner.__init__",
        "gang.loss_number if gang is not None else int",
        "int",
        module="elastic_dp.train.step.micro_batch",
        caught_by=SAME_ROWS,
    ),
    ModuleMutant(
        "a parameter that all processes have counts in the norm for each of them",
        "CommittedGradients.__init__",
        "gang.counts(p)",
        "True",
        module="elastic_dp.train.step.committed_gradients",
        caught_by=SAME_POSITIONS,
    ),
    ModuleMutant(
        "losses of processes with the same rows count for each of them",
        "StepRunner._attempt",
        "1 if self.gang is None else self.gang.num_losses",
        "1 if self.gang is None else self.gang.size",
        module="elastic_dp.train.step.step_runner",
        caught_by=SAME_POSITIONS,
    ),
    ModuleMutant(
        "losses of processes with the same rows are not compared",
        "_check_losses",
        "(one.loss, one.weight) != (other.loss, other.weight)",
        "False",
        module="elastic_dp.train.step.gang_step",
        caught_by=f"{REFUSED_TP}[with_other_losses-the loss of step 1 on virtual worker 0 is]",
        is_slow=True,
    ),
    ModuleMutant(
        "gradients of a parameter that all processes have are not compared",
        "check_replicated",
        "name is not None",
        "False",
        module="elastic_dp.train.step.gang_step",
        caught_by=(
            f"{REFUSED_TP}[with_heads_that_are_normalized_apart-"
            "different gradients for model.layer.head_norm.]"
        ),
        is_slow=True,
    ),
    ModuleMutant(
        "values of a parameter that all processes have are not compared",
        "_check_same_values",
        "differing is not None",
        "False",
        module="elastic_dp.train.gang.gang_checks",
        caught_by=(
            f"{REFUSED_TP}[with_other_values-model.norm.bias is not sharded by tensor parallelism]"
        ),
        is_slow=True,
    ),
    ModuleMutant(
        "gradients that came as terms of a sum are not added up",
        "placed_like",
        "gradient.placements == parameter.placements",
        "True",
        module="elastic_dp.distributed.local_shards",
        caught_by=(
            f"{TP_TESTS}::"
            "test_sequence_parallelism_and_a_loss_of_sharded_logits_train_as_one_process_does"
        ),
        is_slow=True,
    ),
    ModuleMutant(
        "fully_shard divides a tensor before tensor parallelism does",
        "_view_of",
        "reversed(_divisions(like))",
        "_divisions(like)",
        module="elastic_dp.distributed.local_shards",
        caught_by=(
            "tests/distributed/test_local_shards.py::"
            "test_parts_of_two_dimensions_are_those_of_torch"
        ),
    ),
    ModuleMutant(
        "an evaluation of parts of the positions is that of the first process",
        "_one",
        "session.gang.context_parallel_size > 1",
        "False",
        module="elastic_dp.train.step.evaluation",
        caught_by=PARTS_OF_POSITIONS,
    ),
    ModuleMutant(
        "rows of which each process has a part of the positions are made by other random numbers",
        "MicroBatchRunner.__init__",
        "gang.micro_batch if gang is not None else int",
        "gang.loss_number if gang is not None else int",
        module="elastic_dp.train.step.micro_batch",
        caught_by=PARTS_OF_POSITIONS,
    ),
]

NAMED = os.environ.get("GANG_MUTANT")
if NAMED is not None:
    take_out(next(one for one in GANG_MUTANTS if one.name == NAMED))
    take_out_in_workers(__name__)
