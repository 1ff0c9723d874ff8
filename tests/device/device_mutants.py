"""Each guard of the device path, taken out, and the test that then fails.

As a plugin of pytest (`-p tests.device.device_mutants`) this module takes out the guard that the
environment variable DEVICE_MUTANT names, before anything imports it.
"""

from __future__ import annotations

import os

from tests import patience
from tests.module_mutants import ModuleMutant, take_out

TRANSPORT = "elastic_dp.distributed.device_transport"
CONNECTION = "elastic_dp.distributed.device_connection"
TRANSPORT_TESTS = "tests/distributed/test_device_transport.py"

DEVICE_MUTANTS = [
    ModuleMutant(
        "an output is read before its event",
        "DeviceTransport.read",
        "self.synchronize()",
        "pass",
        module=TRANSPORT,
        caught_by=f"{TRANSPORT_TESTS}::test_an_output_is_not_read_on_the_host_before_its_event",
    ),
    ModuleMutant(
        "an aborted collective is read",
        "DeviceTransport._check",
        "self._group.check()",
        "pass",
        module=TRANSPORT,
        caught_by=f"{TRANSPORT_TESTS}::test_an_aborted_collective_is_not_read",
    ),
    ModuleMutant(
        "a failure of the communicator is not noticed",
        "DeviceTransport._check",
        "raise CollectiveFailed(failure)",
        "pass",
        module=TRANSPORT,
        caught_by=f"{TRANSPORT_TESTS}::"
        "test_failure_of_the_communicator_is_noticed_while_the_host_waits",
    ),
    ModuleMutant(
        "operations are kept for a generation",
        "DeviceTransport.synchronize",
        "self._unconfirmed.clear()",
        "pass",
        module=TRANSPORT,
        caught_by=f"{TRANSPORT_TESTS}::test_operations_do_not_pile_up_over_a_thousand_steps",
    ),
    ModuleMutant(
        "staging memory is used once",
        "StagingMemory.give_back",
        "self._free.setdefault(flat.numel(), []).append(flat)",
        "pass",
        module=TRANSPORT,
        caught_by=f"{TRANSPORT_TESTS}::test_staging_memory_is_used_again",
    ),
    ModuleMutant(
        "gradient memory is new in each generation",
        "GradientBufferPool.give_back",
        "self._free += memory",
        "pass",
        module="elastic_dp.distributed.cross_worker_reduction",
        caught_by=f"{TRANSPORT_TESTS}::test_gradient_memory_is_the_same_after_fifty_generations",
    ),
    ModuleMutant(
        "an abort blocks who asks for it",
        "DeviceConnection.abort",
        "abort_in_background(communicator.abort)",
        "communicator.abort()",
        module=CONNECTION,
        caught_by=f"{TRANSPORT_TESTS}::test_no_lock_is_held_while_an_abort_hangs",
    ),
    ModuleMutant(
        "an abort may last for ever",
        "abort_in_background",
        "os._exit(_EXIT_CODE)",
        "pass",
        module="elastic_dp.distributed.abort_limit",
        caught_by=f"{TRANSPORT_TESTS}::test_a_worker_whose_abort_does_not_end_exits",
    ),
    ModuleMutant(
        "a planned end aborts in the training thread",
        "DeviceTransport.come_to_rest",
        "if self._unconfirmed:\n    self.abort()",
        "self._connection.abort()",
        module=TRANSPORT,
        caught_by=f"{TRANSPORT_TESTS}::test_a_planned_end_does_not_abort_in_the_training_thread",
    ),
    ModuleMutant(
        "connecting begins without the others",
        "DeviceConnection._connect",
        "not self._wait_for_presence(store)",
        "False",
        module=CONNECTION,
        caught_by=f"{TRANSPORT_TESTS}::test_connecting_names_who_is_absent",
    ),
    ModuleMutant(
        "connecting may last for ever",
        "DeviceConnection.check",
        "time.monotonic() < self._deadline",
        "True",
        module=CONNECTION,
        caught_by=f"{TRANSPORT_TESTS}::test_connecting_ends_by_an_abort_and_after_its_time",
    ),
    ModuleMutant(
        "NCCL blocks while it connects",
        "NcclCommunicator.__init__",
        "options.config.blocking = 0",
        "pass",
        module="elastic_dp.device.nccl_communicator",
        caught_by=f"{TRANSPORT_TESTS}::"
        "test_nccl_is_made_without_blocking_and_with_the_ranks_of_its_group",
    ),
    ModuleMutant(
        "NCCL does not know the ranks of its group",
        "NcclCommunicator.__init__",
        "options.global_ranks_in_group = list(range(world_size))",
        "pass",
        module="elastic_dp.device.nccl_communicator",
        caught_by=f"{TRANSPORT_TESTS}::"
        "test_nccl_is_made_without_blocking_and_with_the_ranks_of_its_group",
    ),
    ModuleMutant(
        "weights made on the device ignore the seed",
        "open_gpu_generators",
        "torch.cuda.init()",
        "pass",
        module="elastic_dp.device.gpu",
        caught_by="tests/train/test_worker_run.py::"
        "test_initial_weights_made_on_a_device_follow_the_seed",
    ),
    ModuleMutant(
        "the precision of products is not of the kind",
        "gpu_kind",
        'f"fp32 {backend.matmul.fp32_precision}/{conv}/{rnn}"',
        '""',
        module="elastic_dp.device.gpu",
        caught_by="tests/train/exactness/test_machine_kind.py::"
        "test_kind_of_a_gpu_changes_with_each_setting_that_chooses_its_kernels",
    ),
    ModuleMutant(
        "a replay of a graph writes gradients that wait",
        "graphs_are_replayed",
        "_TREES in sys.modules",
        "False",
        module="elastic_dp.device.graph_replay",
        caught_by="tests/distributed/test_gradient_reducer.py::"
        "test_gradients_in_the_memory_of_a_cuda_graph_are_copied_while_they_wait",
    ),
    ModuleMutant(
        "torch's watchdog ends survivors",
        "set_nccl_environment",
        "environment[name] = value",
        "pass",
        module="elastic_dp.distributed.nccl_environment",
        caught_by="tests/distributed/test_nccl_environment.py::"
        "test_set_nccl_environment_with_a_value_that_ends_survivors_overrides_and_says_so",
    ),
    ModuleMutant(
        "a fault of the device is an error of the code",
        "_kind_of",
        "isinstance(error, torch.AcceleratorError) or _DEVICE.search(text)",
        "False",
        module="elastic_dp.device.faults",
        caught_by="tests/device/test_faults.py::test_fault_of_a_device_is_a_device_fault",
    ),
    ModuleMutant(
        "a joiner without memory joins",
        "suppress_errors_of_code",
        "fault_of(error) is not None",
        "False",
        module="elastic_dp.device.faults",
        caught_by="tests/device/test_faults.py::test_suppress_errors_of_code_lets_faults_through",
    ),
    ModuleMutant(
        "a step writes what a snapshot still copies",
        "HostCopies.copy",
        "current.wait_event(done)",
        "pass",
        module="elastic_dp.device.host_copies",
        caught_by="tests/device/test_host_copies.py::"
        "test_copy_from_a_device_orders_streams_and_does_not_wait",
    ),
    ModuleMutant(
        "a worker without its GPU trains on the CPU",
        "pick_device",
        "gpu is not None",
        "True",
        module="elastic_dp.cluster.worker",
        caught_by="tests/cluster/test_device.py::"
        "test_pick_device_with_a_gpu_that_is_not_there_raises",
    ),
]


if "DEVICE_MUTANT" in os.environ:
    patience.PATIENCE_S = 5.0
    take_out(next(one for one in DEVICE_MUTANTS if one.name == os.environ["DEVICE_MUTANT"]))
