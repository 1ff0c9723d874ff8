"""Each guard of finished work, taken out, and the test that then fails.

As a plugin of pytest (`-p tests.train.finished_work_mutants`) this module takes out the guard that
the environment variable FINISHED_WORK_MUTANT names, before anything imports it.
"""

from __future__ import annotations

import os

from tests.module_mutants import ModuleMutant, take_out, take_out_in_workers

RUNNER = "elastic_dp.train.step.step_runner"
REDUCER_TESTS = "tests/distributed/test_gradient_reducer.py"
RUN_TESTS = "tests/train/test_finished_work.py"
TORN = f"{REDUCER_TESTS}::test_finished_subtrees_of_a_torn_step_give_the_same_bits"
EXCHANGED = (
    f"{REDUCER_TESTS}::test_step_torn_after_the_exchange_keeps_all_subtrees_and_gives_the_same_bits"
)
OTHER_INPUT = f"{RUN_TESTS}::test_finished_work_of_another_input_is_forgotten"
OTHER_STEP = f"{RUN_TESTS}::test_finished_work_of_another_step_or_weight_is_forgotten"


def without_key(name: str, code: str, instead: str, caught_by: str) -> ModuleMutant:
    return ModuleMutant(
        f"finished work does not depend on the {name}",
        "StepRunner._begin_finished",
        code,
        instead,
        module=RUNNER,
        caught_by=caught_by,
    )


FINISHED_WORK_MUTANTS = [
    ModuleMutant(
        "a torn node is used again",
        "LocalReduction.finished",
        "self.complete()",
        "self._stack",
        module="elastic_dp.distributed.local_reduction",
        caught_by=TORN,
    ),
    ModuleMutant(
        "a last subtree counts before it is sent",
        "GradientReducer.finished",
        "self._is_last and self._next == len(self._exchanges)",
        "self._is_last",
        module="elastic_dp.distributed.gradient_reducer",
        caught_by=TORN,
    ),
    ModuleMutant(
        "an absent gradient is a gradient of zeros",
        "GradientReducer.finished",
        "view if there else None",
        "view",
        module="elastic_dp.distributed.gradient_reducer",
        caught_by=TORN,
    ),
    ModuleMutant(
        "a sum that was multiplied is a finished subtree",
        "BucketReduction.holds_last_subtree",
        "not self._overwritten",
        "True",
        module="elastic_dp.distributed.cross_worker_reduction",
        caught_by=f"{EXCHANGED}[alone-scaled]",
    ),
    ModuleMutant(
        "finished parts arrive in what a worker has sent",
        "BucketReduction.__init__",
        "self._total[:world_size * chunk]",
        "self._flats[0]",
        module="elastic_dp.distributed.cross_worker_reduction",
        caught_by=f"{EXCHANGED}[gathered-reduced]",
    ),
    ModuleMutant(
        "a worker adds what it receives to what it has sent",
        "BucketReduction.sum_part",
        "torch.add(mine, theirs, out=theirs)",
        "theirs.copy_(mine.add_(theirs))",
        module="elastic_dp.distributed.cross_worker_reduction",
        caught_by=f"{EXCHANGED}[swapped-reduced]",
    ),
    ModuleMutant(
        "memory of a finished node is sent from again",
        "BucketReduction.keep_last_subtree",
        "memory.data_ptr() != address",
        "True",
        module="elastic_dp.distributed.cross_worker_reduction",
        caught_by=f"{REDUCER_TESTS}::test_finished_subtree_in_memory_that_was_sent_is_the_callers",
    ),
    without_key("step", "step", "0", OTHER_STEP),
    without_key("lineage", "self._lineage_id", "0", OTHER_INPUT),
    without_key("mode", "self.exact", "True", OTHER_INPUT),
    without_key("expected weight", "expected", "0.0", OTHER_STEP),
    without_key(
        "loss scale",
        "self.state.loss_scale.scale if self.state.loss_scale else None",
        "None",
        OTHER_INPUT,
    ),
    without_key(
        "bad row groups", "frozenset(self.state.bad_row_groups)", "frozenset[int]()", OTHER_INPUT
    ),
    without_key("layout", "self.gradients.parameters", "()", OTHER_INPUT),
    ModuleMutant(
        "inputs are not compared",
        "finished_of",
        "work.inputs == inputs",
        "True",
        module="elastic_dp.train.step.finished_work",
        caught_by=OTHER_INPUT,
    ),
    ModuleMutant(
        "finished work is used where a stop is requested",
        "StepRunner._begin_finished",
        "stop is not None",
        "False",
        module=RUNNER,
        caught_by=f"{RUN_TESTS}::test_finished_work_is_forgotten_when_a_stop_is_requested",
    ),
    ModuleMutant(
        "a node is used beyond the end of its range",
        "FinishedWork.take",
        "node[0] == first and node[1] <= limit",
        "node[0] == first",
        module="elastic_dp.train.step.finished_work",
        caught_by=f"{RUN_TESTS}::"
        "test_finished_node_is_taken_once_and_only_where_it_lies_in_the_range",
    ),
    ModuleMutant(
        "who receives state keeps what it has finished",
        "WorkerSession._enter",
        "self.step_runner.forget_finished()",
        "pass",
        module="elastic_dp.train.worker_session",
        caught_by=f"{RUN_TESTS}::test_worker_that_receives_a_step_forgets_what_it_has_finished",
    ),
    ModuleMutant(
        "nothing is used again",
        "StepRunner._keep_finished",
        "self._finished is None",
        "True",
        module=RUNNER,
        caught_by=f"{RUN_TESTS}::test_lost_worker_without_a_replacement_only_its_leaves_run_again",
    ),
]


NAMED = os.environ.get("FINISHED_WORK_MUTANT")
if NAMED is not None:
    take_out(next(one for one in FINISHED_WORK_MUTANTS if one.name == NAMED))
    take_out_in_workers(__name__)
