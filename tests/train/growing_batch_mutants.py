"""Each guard of a batch that grows and of the noise scale, taken out, and the test that then fails.

As a plugin of pytest (`-p tests.train.growing_batch_mutants`) this module takes out the guard that
the environment variable GROWING_BATCH_MUTANT names, before anything imports it.
"""

from __future__ import annotations

import os

from tests.module_mutants import ModuleMutant, take_out, take_out_in_workers

RUNNER = "elastic_dp.train.step.step_runner"
ORDER = "elastic_dp.sampling.growing_order"
ORDER_TESTS = "tests/sampling/test_growing_order.py"
RUN_TESTS = "tests/train/test_growing_batch.py"
NOISE_TESTS = "tests/train/test_noise_scale.py"
ONCE = f"{ORDER_TESTS}::test_each_row_is_taken_once_an_epoch_whatever_the_schedule"
REFUSED = f"{RUN_TESTS}::test_rerun_with_another_batch_in_steps_that_were_made_is_refused_by_name"

GROWING_BATCH_MUTANTS = [
    ModuleMutant(
        "a step keeps the shares of the step before",
        "StepRunner._attempt",
        "self._numbers_of(step) != self._numbers",
        "False",
        module=RUNNER,
        caught_by=f"{RUN_TESTS}::test_steps_have_the_rows_that_the_schedule_says",
    ),
    ModuleMutant(
        "finished work is told in the virtual workers of the step",
        "StepRunner.finished_nodes",
        "whole_blocks(finished.nodes, self.schedule.least, self.schedule.at(step))",
        "tuple(sorted(finished.nodes))",
        module=RUNNER,
        caught_by=f"{RUN_TESTS}::test_lost_worker_behind_the_change_only_its_leaves_run_again",
    ),
    ModuleMutant(
        "a step takes what the next epoch has",
        "GrowingOrder._position",
        "min(stage.size, self._per_epoch - first)",
        "stage.size",
        module=ORDER,
        caught_by=ONCE,
    ),
    ModuleMutant(
        "micro-batches without rows make steps",
        "GrowingOrder._count_micro_batches",
        "-(-base.num_rows // base.micro_batch_size)",
        "base.steps_per_epoch * base.virtual_workers",
        module=ORDER,
        caught_by=ONCE,
    ),
    ModuleMutant(
        "virtual workers take micro-batches in their order",
        "GrowingOrder._deal",
        "((at + n) % self.schedule.least, n)",
        "n",
        module=ORDER,
        caught_by=f"{ORDER_TESTS}::test_virtual_workers_keep_to_the_streams_that_they_had",
    ),
    ModuleMutant(
        "the last step that was made counts as one to come",
        "check_growth",
        "int(s) < step",
        "int(s) < step - 1",
        module="elastic_dp.train.checkpointing.job_match",
        caught_by=REFUSED,
    ),
    ModuleMutant(
        "a checkpoint's growth is not compared",
        "check_job",
        "then.get(GROWTH, {})",
        "job.get(GROWTH, {})",
        module="elastic_dp.train.checkpointing.job_match",
        caught_by=(
            f"{RUN_TESTS}::test_checkpoint_of_another_batch_is_refused_by_the_worker_that_reads_it"
        ),
    ),
    ModuleMutant(
        "the noise of a step is made of a clipped gradient",
        "gradient_square",
        "squares_of_units(layout.pieces(gradients))",
        "squares_of_units(layout.pieces(gradients)).clamp(max=1e-9)",
        module="elastic_dp.distributed.gradient_norm",
        caught_by=f"{NOISE_TESTS}::test_mean_of_the_estimates_has_no_bias",
    ),
    ModuleMutant(
        "weights do not count in the noise scale",
        "MicroBatchResult.take_leaf_square",
        "self.weight / scaled",
        "1.0 / scaled",
        module="elastic_dp.train.step.micro_batch",
        caught_by=f"{NOISE_TESTS}::test_weights_are_the_unit_of_the_noise_scale",
    ),
]

NAMED = os.environ.get("GROWING_BATCH_MUTANT")
if NAMED is not None:
    take_out(next(one for one in GROWING_BATCH_MUTANTS if one.name == NAMED))
    take_out_in_workers(__name__)
