"""Each guard of rounded gradients, taken out, and the test that then fails.

As a plugin of pytest (`-p tests.distributed.gradient_rounding_mutants`) this module takes out the
guard that the environment variable GRADIENT_ROUNDING_MUTANT names, before anything imports it.
"""

from __future__ import annotations

import os

from tests.module_mutants import ModuleMutant, take_out, take_out_in_workers

LOCAL = "elastic_dp.distributed.local_reduction"
ACROSS = "elastic_dp.distributed.cross_worker_reduction"
REDUCER = "elastic_dp.distributed.gradient_reducer"
BUCKETS = "elastic_dp.distributed.gradient_buckets"
ROUNDING = "elastic_dp.distributed.gradient_rounding"
INT8 = "elastic_dp.distributed.int8_rounding"
TESTS = "tests/distributed/test_gradient_rounding.py"
OF_INT8 = "tests/distributed/test_int8_rounding.py"
ROUNDED = f"{TESTS}::test_every_node_is_rounded_whoever_adds_it"
HELD = (
    "tests/distributed/test_reduction_to_holders.py"
    "::test_each_holder_gets_the_bits_of_the_whole_sum"
)
RUN_AGAIN = "tests/cluster/runs/test_rerun.py"

GRADIENT_ROUNDING_MUTANTS = [
    ModuleMutant(
        "only what is sent is rounded",
        "LocalReduction.sum_gradient",
        "value = rounding.round(value, node, first, None if self.merges else out)",
        "pass",
        module=LOCAL,
        caught_by=ROUNDED,
    ),
    ModuleMutant(
        "a leaf that is alone in its subtree is not rounded",
        "LocalReduction.sum_gradient",
        "rounding.round(value, node, first, None if self.merges else out)",
        "rounding.round(value, node, first) if self.merges or out is not None else value",
        module=LOCAL,
        caught_by=ROUNDED,
    ),
    ModuleMutant(
        "the sum is multiplied before it is converted",
        "BucketReduction.scale_on_device",
        "self._result.mul_(factor)",
        "self._result.copy_(self._total.mul_(factor))",
        module=ACROSS,
        caught_by=f"{ROUNDED}[bf16-alone]",
    ),
    ModuleMutant(
        "gradients are sent as they are",
        "BucketReduction._buffer",
        "dtype or rounding.dtype",
        "dtype or self.bucket.dtype",
        module=ACROSS,
        caught_by=f"{TESTS}::test_half_or_a_quarter_of_the_bytes_are_sent",
    ),
    ModuleMutant(
        "a finished node is given back in the dtype in which it was sent",
        "GradientReducer.add_finished",
        "rounding.gradient(gradient, p)",
        "gradient",
        module=REDUCER,
        # With one member: others would wait for the one that fails.
        caught_by=(
            f"{TESTS}::test_finished_subtrees_of_a_torn_step_are_rounded_nodes[bf16-1-None-same]"
        ),
    ),
    ModuleMutant(
        "gradients of 16 bits are rounded, too",
        "rounding_of",
        "wire is None or dtype in _NARROW",
        "wire is None",
        module=ROUNDING,
        caught_by=f"{TESTS}::test_gradients_of_16_bits_are_not_rounded",
    ),
    ModuleMutant(
        "what is drawn does not depend on the node",
        "Int8Rounding._key",
        "(self._seed, *node)",
        "(self._seed,)",
        module=INT8,
        caught_by=f"{OF_INT8}::test_rounding_is_right_on_average_for_each_element",
    ),
    ModuleMutant(
        "what is drawn does not depend on the step",
        "Int8Rounding._key",
        "(self._seed, *node)",
        "(0, *node)",
        module=INT8,
        caught_by=f"{OF_INT8}::test_rounding_is_right_on_average_for_each_element",
    ),
    ModuleMutant(
        "no step has a seed of its own",
        "StepRunner._attempt",
        "rounding_seed(self.seed, step)",
        "0",
        module="elastic_dp.train.step.step_runner",
        caught_by="tests/train/test_wire.py::test_each_step_and_seed_rounds_its_own_way",
    ),
    ModuleMutant(
        "a rank draws as if its part began the bucket",
        "BucketReduction._received_sums",
        "self.bucket.first_block + current.first * self._plan.chunk_blocks(self.bucket)",
        "self.bucket.first_block",
        module=ACROSS,
        caught_by=f"{ROUNDED}[int8-subtrees]",
    ),
    ModuleMutant(
        "each bucket draws as the first",
        "GradientLayout.__init__",
        "GradientBucket(len(self.buckets), first, cut, rounding, first_block)",
        "GradientBucket(len(self.buckets), first, cut, rounding, 0)",
        module=BUCKETS,
        caught_by=f"{TESTS}::test_cut_into_buckets_changes_no_bit",
    ),
    ModuleMutant(
        "the pieces of a sum draw alike",
        "Int8Rounding.add",
        "first + number * _PIECE_BLOCKS",
        "first",
        module=INT8,
        caught_by=f"{OF_INT8}::test_blocks_are_rounded_and_added_as_the_model_says_piece_by_piece",
    ),
    ModuleMutant(
        "numbers are rounded to the nearest",
        "_write",
        "numbers.add_(noise, alpha=2.0**-16)",
        "numbers",
        module=INT8,
        caught_by=f"{OF_INT8}::test_rounding_is_right_on_average_for_each_element",
    ),
    ModuleMutant(
        "a whole number may be rounded to another one",
        "_write",
        "2.0**-16",
        "2.0**-15",
        module=INT8,
        caught_by=f"{OF_INT8}::test_rounded_sum_stays_as_it_is",
    ),
    ModuleMutant(
        "a block that is not finite becomes finite",
        "_write",
        "scales.masked_fill_(is_finite.logical_not_(), _NOT_FINITE)",
        "scales",
        module=INT8,
        caught_by=f"{OF_INT8}::test_block_with_what_is_not_finite_stays_so",
    ),
    ModuleMutant(
        "the scale is too small for the largest number",
        "_write",
        "0x1FFFF",
        "0",
        module=INT8,
        caught_by=f"{OF_INT8}::test_sum_is_rounded_to_the_least_scale_for_which_all_numbers_fit",
    ),
    ModuleMutant(
        "the finished sum is not converted",
        "BucketReduction.arrive",
        "self.bucket.rounding.restore(self._total, self._result)",
        "pass",
        module=ACROSS,
        caught_by=ROUNDED,
    ),
    ModuleMutant(
        "the finished sums of pieces are sent as if a block were an element",
        "ReductionPlan.route",
        "rounding.record",
        "rounding.block",
        module=ACROSS,
        caught_by=HELD,
    ),
    ModuleMutant(
        "the last block of a parameter does not travel to those that need it",
        "piece_route",
        "-(-one.last // block)",
        "one.last // block",
        module="elastic_dp.distributed.piece_routes",
        caught_by=("tests/distributed/test_piece_routes.py::test_each_rank_gets_its_pieces_whole"),
    ),
    ModuleMutant(
        "a checkpoint does not say how gradients were rounded",
        "job_identity",
        "spec.wire",
        "None",
        module="elastic_dp.train.checkpointing.job_match",
        caught_by=f"{RUN_AGAIN}::test_run_with_rounded_gradients_goes_on_only_with_them",
    ),
    ModuleMutant(
        "a model in fp64 is rounded",
        "TrainingParts.build",
        "check_wire(spec.wire, dict(given.model.named_parameters()))",
        "pass",
        module="elastic_dp.train.training_parts",
        caught_by=("tests/train/test_wire.py::test_model_in_fp64_is_refused_before_the_first_step"),
    ),
]

NAMED = os.environ.get("GRADIENT_ROUNDING_MUTANT")
if NAMED is not None:
    take_out(next(one for one in GRADIENT_ROUNDING_MUTANTS if one.name == NAMED))
    take_out_in_workers(__name__)
