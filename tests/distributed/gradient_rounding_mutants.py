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
TESTS = "tests/distributed/test_gradient_rounding.py"
ROUNDED = f"{TESTS}::test_every_node_is_rounded_whoever_adds_it"
RUN_AGAIN = "tests/cluster/runs/test_rerun.py"

GRADIENT_ROUNDING_MUTANTS = [
    ModuleMutant(
        "only what is sent is rounded",
        "LocalReduction.sum_gradient",
        "value = rounded(value, self._wire, None if self.merges else out)",
        "pass",
        module=LOCAL,
        caught_by=ROUNDED,
    ),
    ModuleMutant(
        "a leaf that is alone in its subtree is not rounded",
        "LocalReduction.sum_gradient",
        "rounded(value, self._wire, None if self.merges else out)",
        "rounded(value, self._wire) if self.merges or out is not None else value",
        module=LOCAL,
        caught_by=ROUNDED,
    ),
    ModuleMutant(
        "the sum is multiplied before it is converted",
        "BucketReduction.scale_on_device",
        "self._result.copy_(self._total)",
        "self._result.copy_(self._total.mul_(factor)); factor = 1.0",
        module=ACROSS,
        caught_by=ROUNDED,
    ),
    ModuleMutant(
        "gradients are sent as they are",
        "BucketReduction._buffer",
        "self.bucket.wire_dtype",
        "self.bucket.dtype",
        module=ACROSS,
        caught_by=f"{TESTS}::test_half_of_the_bytes_are_sent",
    ),
    ModuleMutant(
        "a finished node is given back in the dtype in which it was sent",
        "GradientReducer.add_finished",
        "converted(gradient, p.dtype)",
        "gradient",
        module=REDUCER,
        # With one member: others would wait for the one that fails.
        caught_by=f"{TESTS}::test_finished_subtrees_of_a_torn_step_are_rounded_nodes[1-None-same]",
    ),
    ModuleMutant(
        "gradients of 16 bits are rounded, too",
        "wire_dtype",
        "wire is None or dtype in _NARROW",
        "wire is None",
        module="elastic_dp.distributed.gradient_rounding",
        caught_by=f"{TESTS}::test_gradients_of_16_bits_are_not_rounded",
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
