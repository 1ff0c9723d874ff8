"""Each guard of delayed gradients, taken out, and the test that then fails.

As a plugin of pytest (`-p tests.train.staleness_mutants`) this module takes out the guard that the
environment variable STALENESS_MUTANT names, before anything imports it.
"""

from __future__ import annotations

import os

from tests.module_mutants import ModuleMutant, take_out, take_out_in_workers

DELAYED = "elastic_dp.train.step.delayed_gradient"
RUNNER = "elastic_dp.train.step.step_runner"
PREVIOUS = "elastic_dp.train.state.previous_step"
REDUCER = "elastic_dp.distributed.gradient_reducer"
REDUCER_TESTS = "tests/distributed/test_gradient_reducer.py"
TESTS = "tests/train/test_staleness.py"
OF_EACH_STEP = f"{TESTS}::test_weights_after_each_step_are_those_of_a_loop_in_plain_torch"
IN_PLAIN_TORCH, SCHEDULED = f"{OF_EACH_STEP}[1]", f"{OF_EACH_STEP}[staleness1]"
LOST = f"{TESTS}::test_lost_worker_only_its_leaves_of_both_steps_run_again"
RESIZED = f"{TESTS}::test_zoo_model_through_changing_sizes_has_the_local_digest[batch_norm]"
OTHER_LOSS = f"{TESTS}::test_loss_that_depends_on_the_body_is_refused_by_name"
SHARED = f"{REDUCER_TESTS}::test_two_reducers_share_the_work_of_one"

STALENESS_MUTANTS = [
    ModuleMutant(
        "a gradient is applied at once",
        "TrainingParts.build",
        "PreviousStep(given.model, loss_scale) if spec.delays else None",
        "None",
        module="elastic_dp.train.training_parts",
        caught_by=IN_PLAIN_TORCH,
    ),
    ModuleMutant(
        "a sum is multiplied by what is for the next one",
        "StepRunner._attempt",
        "own if self.delayed is None else self.delayed.previous.factor",
        "own",
        module=RUNNER,
        caught_by=f"{TESTS}::test_losses_with_weights_of_their_own_have_the_factor_of_their_step",
    ),
    ModuleMutant(
        "the first step calls the optimizer",
        "StepRunner._attempt",
        "finite if applies else None",
        "finite",
        module=RUNNER,
        caught_by=IN_PLAIN_TORCH,
    ),
    ModuleMutant(
        "a lost leaf is computed with the weights of now",
        "PreviousStep._swap",
        "copy_values(p, value)",
        "pass",
        module=PREVIOUS,
        caught_by=LOST,
    ),
    ModuleMutant(
        "the weights of the step before are overwritten by the commit",
        "PreviousStep.record",
        "value.copy_(p)",
        "value.set_(p.detach())",
        module=PREVIOUS,
        caught_by=LOST,
    ),
    ModuleMutant(
        "a lost leaf finds the buffers of now",
        "ModuleBuffers.replaced",
        "self._put(buffers, extra)",
        "pass",
        module="elastic_dp.train.state.module_buffers",
        caught_by=f"{TESTS}::test_buffers_of_a_step_are_there_when_its_leaves_run_again",
    ),
    ModuleMutant(
        "another loss is not noticed",
        "DelayedGradient._own_sums",
        "self.previous.check({v: (one.loss, one.weight) for v, one in results.items()})",
        "pass",
        module=DELAYED,
        caught_by=f"{OTHER_LOSS}[1-2]",
    ),
    ModuleMutant(
        "nothing runs again before something is lost",
        "DelayedGradient._own_sums",
        "step + 1 == self._staleness.begin_of(step) + _TRIED",
        "False",
        module=DELAYED,
        caught_by=f"{OTHER_LOSS}[1-2]",
    ),
    ModuleMutant(
        "a delay that begins later is not tried",
        "DelayedGradient._own_sums",
        "self._staleness.begin_of(step) + _TRIED",
        "_TRIED",
        module=DELAYED,
        caught_by=f"{OTHER_LOSS}[staleness1-4]",
    ),
    ModuleMutant(
        "the gradient of the last delayed step is applied when the next ones are delayed",
        "DelayedGradient.commit",
        "self.previous.forget()",
        "pass",
        module=DELAYED,
        caught_by=SCHEDULED,
    ),
    ModuleMutant(
        "a schedule of delays is that of the run's first step",
        "DelayedGradient.delays",
        "self._staleness.at(step)",
        "self._staleness.at(1)",
        module=DELAYED,
        caught_by=SCHEDULED,
    ),
    ModuleMutant(
        "a worker goes on as in the step before where the delay changes",
        "StepRunner._numbers_of",
        "self.staleness.at(step)",
        "0",
        module=RUNNER,
        caught_by=SCHEDULED,
    ),
    ModuleMutant(
        "what was sent in a step that was cut is not held again",
        "DelayedGradient.hold_again",
        "self._sent and self.exists",
        "False",
        module=DELAYED,
        caught_by=LOST,
    ),
    ModuleMutant(
        "the sum waits for the leaves of the step",
        "StepRunner._attempt",
        "self.sums.advance",
        "lambda: None",
        module=RUNNER,
        caught_by=f"{TESTS}::test_leaves_run_while_the_sum_of_the_step_before_is_in_flight",
    ),
    ModuleMutant(
        "a sum goes on before it is sent",
        "GradientReducer.advance",
        "self._next == len(self._exchanges)",
        "True",
        module=REDUCER,
        caught_by=SHARED,
    ),
    ModuleMutant(
        "a sum goes on before the parts of others are there",
        "BucketReduction.has_arrived",
        "all(map(self._plan.group.is_over, latest))",
        "True",
        module="elastic_dp.distributed.cross_worker_reduction",
        caught_by=SHARED,
    ),
    ModuleMutant(
        "a joiner does not get the weights of the step before",
        "TrainState.adopt",
        'self.previous.adopt(step["previous"])',
        "pass",
        module="elastic_dp.train.state.train_state",
        caught_by=RESIZED,
    ),
    ModuleMutant(
        "a checkpoint does not say that gradients are delayed",
        "job_identity",
        "spec.staleness",
        "0",
        module="elastic_dp.train.checkpointing.job_match",
        caught_by=(
            "tests/cluster/runs/test_rerun.py::"
            "test_run_with_delayed_gradients_goes_on_only_with_them"
        ),
    ),
]

NAMED = os.environ.get("STALENESS_MUTANT")
if NAMED is not None:
    take_out(next(one for one in STALENESS_MUTANTS if one.name == NAMED))
    take_out_in_workers(__name__)
