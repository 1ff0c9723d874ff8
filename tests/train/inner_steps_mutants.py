"""Each guard of inner steps, taken out, and the test that then fails.

As a plugin of pytest (`-p tests.train.inner_steps_mutants`) this module takes out the guard that
the environment variable INNER_STEPS_MUTANT names, before anything imports it.
"""

from __future__ import annotations

import os

from tests.module_mutants import ModuleMutant, take_out, take_out_in_workers

INNER = "elastic_dp.train.step.inner_steps"
ARGUMENTS = "elastic_dp.train.loop_guard.inner_arguments"
TESTS = "tests/train/test_inner_steps.py"
OF_MOMENTS = "tests/train/test_inner_moments.py"
IN_PLAIN_TORCH = f"{TESTS}::test_weights_after_each_step_are_those_of_a_loop_in_plain_torch"
IN_STAGES = (
    "tests/train/test_step_schedules.py::"
    "test_each_row_is_used_once_in_an_epoch_where_the_number_of_inner_steps_changes"
)
REFUSED = f"{TESTS}::test_arguments_that_do_not_fit_are_refused_before_the_first_step"

INNER_STEPS_MUTANTS = [
    ModuleMutant(
        "the parameters stay where the inner steps end",
        "InnerSteps.run",
        "copy_values(p, value)",
        "pass",
        module=INNER,
        caught_by=IN_PLAIN_TORCH,
    ),
    ModuleMutant(
        "virtual workers count alike, whatever they weigh",
        "InnerSteps.run",
        "result.weight / expected",
        "1.0",
        module=INNER,
        caught_by=IN_PLAIN_TORCH,
    ),
    ModuleMutant(
        "a parameter without gradients has a pseudo-gradient of zeros",
        "InnerSteps.run",
        "p in used",
        "True",
        module=INNER,
        caught_by=f"{TESTS}::test_parameter_without_a_gradient_gets_none_from_the_inner_steps",
    ),
    ModuleMutant(
        "what inner steps write to a parameter without a gradient is dropped",
        "InnerSteps.run",
        "p._version != version",
        "False",
        module=INNER,
        caught_by=f"{OF_MOMENTS}::test_moments_are_those_of_a_loop_in_plain_torch",
    ),
    ModuleMutant(
        "the inner optimizer is always that of the first step",
        "InnerSteps._train",
        "self.make_optimizer(self.model, step)",
        "self.make_optimizer(self.model, 1)",
        module=INNER,
        caught_by=IN_PLAIN_TORCH,
    ),
    ModuleMutant(
        "the state of inner optimizers waits for the garbage collector",
        "InnerSteps._train",
        "optimizer.state.clear()",
        "pass",
        module=INNER,
        caught_by=f"{TESTS}::test_inner_optimizer_leaves_no_memory_behind",
    ),
    ModuleMutant(
        "gradients of inner steps are not clipped",
        "InnerSteps._update",
        "self.clip_norm is not None",
        "False",
        module=INNER,
        caught_by=IN_PLAIN_TORCH,
    ),
    ModuleMutant(
        "all inner steps draw the same random numbers",
        "MicroBatchRunner.forward",
        "seed_for(self._seed, step, self._key(v))",
        "seed_for(self._seed, step, self._virtual_worker(step, v))",
        module="elastic_dp.train.step.micro_batch",
        caught_by=IN_PLAIN_TORCH,
    ),
    ModuleMutant(
        "a bad row group is noticed in the first inner step only",
        "InnerRows.bad_row_groups",
        "self.keys(step, virtual_worker)",
        "self.keys(step, virtual_worker)[:1]",
        module="elastic_dp.train.step.inner_rows",
        caught_by=(
            f"{TESTS}::test_row_group_that_cannot_be_decoded_is_left_out_in_each_inner_step"
        ),
    ),
    ModuleMutant(
        "inner steps take the rows of later steps",
        "JobSpec.micro_batches_by_step",
        "self.inner_steps_by_step",
        "{0: 1}",
        module="elastic_dp.config.job_spec",
        caught_by=(
            f"{TESTS}::test_each_row_is_used_once_in_an_epoch_and_in_micro_batches_of_its_size"
        ),
    ),
    ModuleMutant(
        "the number of inner steps is always that of the first step",
        "InnerRows.keys",
        "self._inner_steps.at(step)",
        "self._inner_steps.at(1)",
        module="elastic_dp.train.step.inner_rows",
        caught_by=IN_STAGES,
    ),
    ModuleMutant(
        "micro-batches change with the number of virtual workers only",
        "JobSpec.micro_batches_by_step",
        "sorted(virtual.keys() | inner.keys())",
        "sorted(virtual)",
        module="elastic_dp.config.job_spec",
        caught_by=IN_STAGES,
    ),
    ModuleMutant(
        "an inner optimizer may keep its state",
        "_check_optimizers",
        "made is again",
        "False",
        module=ARGUMENTS,
        caught_by=REFUSED,
    ),
    ModuleMutant(
        "what only the inner optimizer trains is lost",
        "_check_optimizers",
        "p in inner and p not in outer",
        "False",
        module=ARGUMENTS,
        caught_by=f"{TESTS}::test_parameter_that_only_the_inner_optimizer_trains_is_refused",
    ),
]

NAMED = os.environ.get("INNER_STEPS_MUTANT")
if NAMED is not None:
    take_out(next(one for one in INNER_STEPS_MUTANTS if one.name == NAMED))
    take_out_in_workers(__name__)
