"""Each guard of the device path, taken out, and the test that then fails.

As a plugin of pytest (`-p tests.device.device_mutants`) this module takes out the guard that the
environment variable DEVICE_MUTANT names, before anything imports it.
"""

from __future__ import annotations

import os

from tests import patience
from tests.module_mutants import ModuleMutant, take_out, take_out_in_workers

TRANSPORT = "elastic_dp.distributed.device_transport"
CONNECTION = "elastic_dp.distributed.device_connection"
TRANSPORT_TESTS = "tests/distributed/test_device_transport.py"
MEMORY_TESTS = "tests/distributed/test_device_memory.py"
ON_A_DEVICE = "tests/train/test_simulated_device.py"
WAITS_ONCE = (
    f"{ON_A_DEVICE}::test_step_waits_once_for_the_device_whatever_its_buckets_leaves_and_buffers"
)
CONNECTION_TESTS = "tests/distributed/test_device_connection.py"
SHARDED = "tests/train/sharding/test_sharded_on_devices.py"
GANGS = "tests/train/test_gangs_on_devices.py"


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
        "self._free.append(torch.empty(0, dtype=torch.uint8).set_(one.untyped_storage()))",
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
        "memory that a peer may still write to is used again",
        "BucketReduction.release",
        "all(map(group.is_over, operations))",
        "True",
        module="elastic_dp.distributed.cross_worker_reduction",
        caught_by="tests/distributed/test_gradient_reducer.py::"
        "test_memory_of_an_exchange_is_used_again_only_when_that_is_over",
    ),
    ModuleMutant(
        "gradient memory of a device stays between generations",
        "GradientReducer._allocate",
        "self._pool.keep_host_memory_only()",
        "pass",
        module="elastic_dp.distributed.gradient_reducer",
        caught_by="tests/distributed/test_gradient_reducer.py::"
        "test_gradient_memory_of_a_device_is_left_to_its_allocator_between_generations",
    ),
    ModuleMutant(
        "workers that share a GPU connect over NCCL",
        "has_own_communicator",
        "gpus >= 1",
        "True",
        module="elastic_dp.device.accelerator",
        caught_by="tests/cluster/test_device.py::"
        "test_workers_that_share_a_gpu_or_have_none_connect_no_devices",
    ),
    ModuleMutant(
        "an abort blocks who asks for it",
        "DeviceConnection._end",
        "abort_in_background(abort)",
        "abort()",
        module=CONNECTION,
        caught_by=f"{TRANSPORT_TESTS}::test_no_lock_is_held_while_an_abort_hangs",
    ),
    ModuleMutant(
        "an abort may last for ever",
        "end_process",
        "os._exit(_EXIT_CODE)",
        "pass",
        module="elastic_dp.distributed.abort_limit",
        caught_by=f"{TRANSPORT_TESTS}::test_a_worker_whose_abort_does_not_end_exits",
    ),
    ModuleMutant(
        "a planned end aborts in the training thread",
        "DeviceTransport.come_to_rest",
        "if self._unconfirmed:\n    self.abort()\n    until = time.monotonic() + REST_LIMIT_S",
        "self._connection.abort()",
        module=TRANSPORT,
        caught_by=f"{TRANSPORT_TESTS}::test_a_planned_end_does_not_abort_in_the_training_thread",
    ),
    ModuleMutant(
        "connecting begins without the others",
        "DeviceConnection._connect",
        "self._wait_for_presence(store, check)",
        "True",
        module=CONNECTION,
        caught_by=f"{CONNECTION_TESTS}::test_connecting_names_who_is_absent",
    ),
    ModuleMutant(
        "connecting may last for ever",
        "DeviceConnection.failure",
        "time.monotonic() < self._deadline()",
        "True",
        module=CONNECTION,
        caught_by=f"{CONNECTION_TESTS}::test_connecting_ends_by_an_abort_and_after_its_time",
    ),
    ModuleMutant(
        "an abort waits for a library that connects",
        "DeviceConnection._connect_members",
        "communicator.connect(check)",
        "self._communicator = communicator\ncommunicator.connect(check)",
        module=CONNECTION,
        caught_by=f"{CONNECTION_TESTS}::test_connecting_that_blocks_an_abort_ends_no_process",
    ),
    ModuleMutant(
        "a communicator that did not connect is never aborted",
        "DeviceConnection._connect_members",
        "_abort_here(communicator)",
        "pass",
        module=CONNECTION,
        caught_by=f"{CONNECTION_TESTS}::test_connecting_ends_by_an_abort_and_after_its_time",
    ),
    ModuleMutant(
        "a communicator that connects late is used",
        "DeviceConnection._connect_members",
        "check()",
        "pass",
        module=CONNECTION,
        caught_by=f"{CONNECTION_TESTS}::"
        "test_communicator_that_connects_when_its_attempt_has_ended_is_aborted",
    ),
    ModuleMutant(
        "the error of a launch keeps its communicator",
        "GradientReducer.close",
        "self._plan = self._error = None",
        "self._plan = None",
        module="elastic_dp.distributed.gradient_reducer",
        caught_by=f"{TRANSPORT_TESTS}::"
        "test_gradients_of_a_generation_that_was_left_keep_no_error_of_its_communicator",
    ),
    ModuleMutant(
        "a late error of an attempt is one of the next",
        "DeviceConnection._connect",
        "attempt == self._attempt",
        "True",
        module=CONNECTION,
        caught_by=f"{CONNECTION_TESTS}::"
        "test_error_of_an_attempt_that_has_ended_is_not_one_of_the_next",
    ),
    ModuleMutant(
        "whoever aborts a communicator destroys it",
        "DeviceConnection._take",
        "self._ended.append(communicator)",
        "pass",
        module=CONNECTION,
        caught_by=f"{CONNECTION_TESTS}::"
        "test_communicator_that_was_aborted_is_destroyed_with_its_connection",
    ),
    ModuleMutant(
        "nobody waits until NCCL is connected",
        "NcclCommunicator.connect",
        "event.query()",
        "True",
        module="elastic_dp.device.nccl_communicator",
        caught_by=f"{CONNECTION_TESTS}::"
        "test_nccl_connects_for_each_kind_of_collective_before_a_step_uses_it",
    ),
    ModuleMutant(
        "members change to the communicator in each step",
        "DeviceTransport.agree",
        "self._connection is None or self._switched",
        "self._connection is None",
        module=TRANSPORT,
        caught_by=f"{TRANSPORT_TESTS}::test_members_change_to_the_communicator_once",
    ),
    ModuleMutant(
        "what is read is not aligned",
        "DeviceTransport.read",
        "piece.clone()",
        "piece",
        module=TRANSPORT,
        caught_by=f"{TRANSPORT_TESTS}::test_tensors_of_several_types_are_read_at_once",
    ),
    ModuleMutant(
        "an error of NCCL while it connects is a fault of the device",
        "DeviceConnection._connect",
        "fault_of(failed)",
        "fault_of(error)",
        module=CONNECTION,
        caught_by=f"{CONNECTION_TESTS}::test_connecting_that_fails_ends_no_generation",
    ),
    ModuleMutant(
        "connecting is tried once",
        "DeviceTransport.agree",
        "self._connection.try_again()",
        "0.0",
        module=TRANSPORT,
        caught_by=f"{TRANSPORT_TESTS}::"
        "test_members_agree_to_try_again_and_use_what_stands_on_all_of_them",
    ),
    ModuleMutant(
        "an attempt begins before the members have agreed",
        "DeviceConnection._next_attempt",
        "self._changed.wait_for(lambda: self._aborted or self._attempt > last)",
        "self._attempt += 1",
        module=CONNECTION,
        caught_by=f"{CONNECTION_TESTS}::test_connecting_is_tried_again_after_pauses_that_grow",
    ),
    ModuleMutant(
        "connecting has the time that a group has to form",
        "GenerationGroups.formed",
        'connect_devices(self.main, self._meeting("devices"), names=names)',
        'connect_devices(self.main, self._meeting("devices"), 0.5)',
        module="elastic_dp.train.generations.generation_groups",
        caught_by=f"{CONNECTION_TESTS}::"
        "test_connecting_takes_the_limit_of_its_own_and_not_that_of_a_group_that_forms",
    ),
    ModuleMutant(
        "an abort frees what a launch uses",
        "DeviceConnection._end",
        "self._in_use.acquire(timeout=_LAUNCH_LIMIT_S)",
        "False",
        module=CONNECTION,
        caught_by=f"{CONNECTION_TESTS}::test_abort_waits_for_a_launch_and_none_begins_after_it",
    ),
    ModuleMutant(
        "an abort waits for a launch that only it can end",
        "DeviceConnection._end",
        "self._in_use.acquire(timeout=_LAUNCH_LIMIT_S)",
        "self._in_use.acquire()",
        module=CONNECTION,
        caught_by=f"{CONNECTION_TESTS}::"
        "test_abort_does_not_wait_long_for_a_launch_that_only_it_can_end",
    ),
    ModuleMutant(
        "a device that no abort frees is waited for",
        "DeviceTransport.come_to_rest",
        "time.monotonic() > until",
        "False",
        module=TRANSPORT,
        caught_by=f"{TRANSPORT_TESTS}::test_device_that_no_abort_frees_ends_the_process",
    ),
    ModuleMutant(
        "a host that polls its device does not see that a peer is gone",
        "DeviceTransport.switch",
        "self._group.watch_peer()",
        "pass",
        module=TRANSPORT,
        caught_by="tests/distributed/test_peer_watch.py::"
        "test_peer_that_dies_while_the_host_waits_for_its_device_is_noticed_at_once",
    ),
    ModuleMutant(
        "a thread keeps a group in which nothing happens any more",
        "ProcessGroup.close",
        "self._watch is not None",
        "False",
        module="elastic_dp.distributed.process_group",
        caught_by="tests/distributed/test_peer_watch.py::"
        "test_peers_that_leave_say_goodbye_so_that_no_thread_keeps_the_group",
    ),
    ModuleMutant(
        "the first all-to-all of a step connects",
        "NcclCommunicator.connect",
        "self.all_to_all(taken, given, sizes, sizes).wait()",
        "pass",
        module="elastic_dp.device.nccl_communicator",
        caught_by=f"{CONNECTION_TESTS}::"
        "test_nccl_connects_for_each_kind_of_collective_before_a_step_uses_it",
    ),
    ModuleMutant(
        "NCCL blocks while it connects",
        "NcclCommunicator.__init__",
        "options.config.blocking = 0",
        "pass",
        module="elastic_dp.device.nccl_communicator",
        caught_by=f"{CONNECTION_TESTS}::"
        "test_nccl_is_made_without_blocking_and_with_the_ranks_of_its_group",
    ),
    ModuleMutant(
        "NCCL does not know the ranks of its group",
        "NcclCommunicator.__init__",
        "options.global_ranks_in_group = list(range(world_size))",
        "pass",
        module="elastic_dp.device.nccl_communicator",
        caught_by=f"{CONNECTION_TESTS}::"
        "test_nccl_is_made_without_blocking_and_with_the_ranks_of_its_group",
    ),
    ModuleMutant(
        "weights made on the device ignore the seed",
        "open_gpu_generators",
        "torch.cuda.init()",
        "pass",
        module="elastic_dp.device.gpu",
        caught_by="tests/train/test_train_function.py::"
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
        "the model of a GPU is not of the kind",
        "gpu_kind",
        'f"{p.name}, {p.multi_processor_count} SMs, capability {p.major}.{p.minor}"',
        '""',
        module="elastic_dp.device.gpu",
        caught_by="tests/train/exactness/test_machine_kind.py::"
        "test_kind_of_a_gpu_names_its_model_and_the_versions_of_its_libraries",
    ),
    ModuleMutant(
        "the versions of its libraries are not of the kind",
        "gpu_kind",
        'f"cuda {torch.version.cuda}, cudnn {torch.backends.cudnn.version()}"',
        '""',
        module="elastic_dp.device.gpu",
        caught_by="tests/train/exactness/test_machine_kind.py::"
        "test_kind_of_a_gpu_names_its_model_and_the_versions_of_its_libraries",
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
        "a replay of a graph writes losses that the host has not read",
        "outside_graphs",
        "value.clone() if graphs_are_replayed() else value",
        "value",
        module="elastic_dp.device.graph_replay",
        caught_by="tests/device/test_graph_replay.py::"
        "test_loss_in_the_memory_of_a_graph_is_kept_until_the_host_reads_it",
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
        "memory is taken from the driver while copies arrive in it",
        "HostCopies.unregister",
        "self.wait()",
        "pass",
        module="elastic_dp.device.host_copies",
        caught_by="tests/device/test_host_copies.py::"
        "test_memory_is_taken_from_the_driver_when_the_copies_into_it_have_arrived",
    ),
    ModuleMutant(
        "the first snapshot goes to memory that is not registered",
        "Uploader.prepare",
        "self._one.submit(self.snapshot.memory.register)",
        "pass",
        module="elastic_dp.checkpoint.uploader",
        caught_by="tests/device/test_host_copies.py::"
        "test_the_memory_of_snapshots_is_registered_before_the_first_one",
    ),
    ModuleMutant(
        "memory for snapshots is made ready at the first one",
        "RequestedCheckpoints._take_if_requested",
        "self._checkpointer.prepare(self._state)",
        "pass",
        module="elastic_dp.train.checkpointing.requested_checkpoints",
        caught_by="tests/device/test_host_copies.py::"
        "test_snapshots_are_prepared_for_after_the_first_step",
    ),
    ModuleMutant(
        "a worker without its GPU trains on the CPU",
        "pick_device",
        "gpu is not None",
        "True",
        module="elastic_dp.cluster.worker_device",
        caught_by="tests/cluster/test_device.py::"
        "test_pick_device_with_a_gpu_that_is_not_there_raises",
    ),
    ModuleMutant(
        "a worker trains on the GPU of another one",
        "pick_device",
        "sees_other_gpus()",
        "False",
        module="elastic_dp.cluster.worker_device",
        caught_by="tests/cluster/test_device.py::"
        "test_pick_device_raises_where_cuda_was_asked_before_ray_gave_the_gpu",
    ),
    ModuleMutant(
        "members switch when one of them is connected",
        "StepHeader.of",
        'all(text.get("connected") for text in texts)',
        'any(text.get("connected") for text in texts)',
        module="elastic_dp.train.step.step_header",
        caught_by="tests/train/step/test_step_header.py::"
        "test_members_are_connected_when_each_of_them_says_so",
    ),
    ModuleMutant(
        "a generation is left while the device is busy",
        "DeviceTransport.come_to_rest",
        "not event.query()",
        "False",
        module=TRANSPORT,
        caught_by=f"{MEMORY_TESTS}::test_device_has_nothing_of_a_generation_to_do_when_it_is_left",
    ),
    ModuleMutant(
        "a generation is left without an abort",
        "DeviceTransport.come_to_rest",
        "self.abort()",
        "pass",
        module=TRANSPORT,
        caught_by=f"{MEMORY_TESTS}::test_device_has_nothing_of_a_generation_to_do_when_it_is_left",
    ),
    ModuleMutant(
        "staging memory is used again while a peer reads it",
        "DeviceTransport.synchronize",
        "operation.sent is not None and operation.sent.work.is_completed()",
        "True",
        module=TRANSPORT,
        caught_by=f"{MEMORY_TESTS}::"
        "test_staging_memory_of_an_operation_in_flight_is_not_used_again",
    ),
    ModuleMutant(
        "operations of the host are kept for a generation",
        "ProcessGroup.wait",
        "self._pending.discard(operation)",
        "pass",
        module="elastic_dp.distributed.process_group",
        caught_by=f"{MEMORY_TESTS}::"
        "test_fifty_generations_leave_no_group_communicator_thread_and_memory",
    ),
    ModuleMutant(
        "the next generation is formed with a broken device",
        "WorkerSession.leave",
        "isinstance(reason, GroupError) and fault_of(reason) is not None",
        "False",
        module="elastic_dp.train.worker_session",
        caught_by="tests/train/test_device_faults.py::"
        "test_leaving_a_generation_is_refused_where_the_device_made_the_collective_fail",
    ),
    ModuleMutant(
        "a process goes on after a fault of its device",
        "exit_if_device_failed",
        "kind is not None",
        "False",
        module="elastic_dp.train.train_function",
        caught_by="tests/train/test_train_function.py::"
        "test_a_device_that_fails_after_the_loop_ends_the_process",
    ),
    ModuleMutant(
        "a process goes on with a lost context",
        "exit_if_device_failed",
        "broken is not None",
        "False",
        module="elastic_dp.train.train_function",
        caught_by="tests/train/test_train_function.py::"
        "test_any_error_on_a_device_whose_context_is_lost_ends_the_process",
    ),
    ModuleMutant(
        "lack of device memory is an error of the code",
        "_kind_of",
        "isinstance(error, torch.OutOfMemoryError)",
        "False",
        module="elastic_dp.device.faults",
        caught_by="tests/device/test_faults.py::test_fault_of_lacking_device_memory_is_out_of_memory",
    ),
    ModuleMutant(
        "a worker takes several GPUs and uses one",
        "ScalingConfig._check_gpus",
        "processes == 1 and amount > 1",
        "False",
        module="elastic_dp.config.scaling_config",
        caught_by="tests/bad_input/test_config.py::"
        "test_scaling_config_out_of_range_names_field_and_value",
    ),
    ModuleMutant(
        "processes of a worker have another number of GPUs",
        "ScalingConfig._check_gpus",
        "processes > 1 and amount not in (0, processes)",
        "False",
        module="elastic_dp.config.scaling_config",
        caught_by="tests/bad_input/test_config.py::"
        "test_scaling_config_out_of_range_names_field_and_value",
    ),
    ModuleMutant(
        "all processes of a worker take its first GPU",
        "visible_to_processes",
        "{VISIBLE: gpu}",
        "{VISIBLE: in_order[0]}",
        module="elastic_dp.device.gpu",
        caught_by="tests/device/test_gpus_of_processes.py::"
        "test_child_finds_its_gpu_and_not_its_parents",
    ),
    ModuleMutant(
        "a worker of several processes switches when one of its devices is connected",
        "record_of_gang",
        "whole.connected",
        "header.connected",
        module="elastic_dp.train.step.gang_step",
        caught_by=f"{GANGS}::test_worker_is_connected_when_the_devices_of_all_its_processes_are",
    ),
    ModuleMutant(
        "workers whose GPUs add in different orders are of one kind",
        "kind_of_gang",
        "not is_gpu(device)",
        "True",
        module="elastic_dp.train.gang.gang_kind",
        caught_by=f"{GANGS}::test_kind_of_a_worker_tells_how_its_gpus_add",
    ),
    ModuleMutant(
        "parts on the host are taken for those of a device",
        "_check_fully_sharded",
        "local_of(p).device.type != gang.mesh.device_type",
        "False",
        module="elastic_dp.train.gang.gang_checks",
        caught_by=f"{GANGS}::test_model_whose_parts_are_kept_on_the_host_is_refused",
    ),
    ModuleMutant(
        "the memory of snapshots is not registered",
        "SnapshotMemory.register",
        "self.copies.register(self.content)",
        "pass",
        module="elastic_dp.checkpoint.snapshot_memory",
        caught_by="tests/device/test_host_copies.py::"
        "test_the_memory_of_snapshots_is_registered_once_in_the_background",
    ),
    ModuleMutant(
        "units of a device are hashed before they have arrived",
        "UnitSnapshot.files",
        "self.memory.copies.wait()",
        "pass",
        module="elastic_dp.checkpoint.unit_snapshot",
        caught_by="tests/device/test_host_copies.py::"
        "test_units_of_a_device_are_read_when_their_copies_have_arrived",
    ),
    ModuleMutant(
        "a sharded step is committed before all devices have done it",
        "ShardedOptimizer.gather",
        "adding.agreed(norm, confirms=on_device is not None)",
        "adding.agreed(norm)",
        module="elastic_dp.train.sharding.sharded_optimizer",
        caught_by=f"{SHARDED}::test_parameters_are_gathered_once_the_devices_of_all_have_them",
    ),
    ModuleMutant(
        "the norm of a sharded gradient is read before it has arrived",
        "ShardedOptimizer.gather",
        "told = on_device.read(told)",
        "pass",
        module="elastic_dp.train.sharding.sharded_optimizer",
        caught_by=f"{SHARDED}::test_step_on_a_simulated_device_has_the_bits_of_the_processor",
    ),
    ModuleMutant(
        "a restored state goes to the device twice",
        "rehome_state",
        "targets(encoded, metas)",
        "{}",
        module="elastic_dp.train.state.state_payload",
        caught_by="tests/train/state/test_state_payload.py::"
        "test_restored_tensors_of_a_device_are_copied_there_once_and_parameters_into_their_own",
    ),
    ModuleMutant(
        "a joiner loads no kernels",
        "GenerationGroups.load_kernels",
        "self._connects",
        "False",
        module="elastic_dp.train.generations.generation_groups",
        caught_by=f"{ON_A_DEVICE}::test_joiner_loads_the_kernels_of_the_device_before_it_joins",
    ),
    ModuleMutant(
        "micro-batches are one iteration of a graph",
        "MicroBatchRunner.forward",
        "begin_graph_iteration()",
        "pass",
        module="elastic_dp.train.step.micro_batch",
        caught_by="tests/device/test_graph_replay.py::test_each_micro_batch_begins_an_iteration",
    ),
    ModuleMutant(
        "nobody asks whether a device failed while it was connected",
        "WorkerSession.next_step",
        "self._groups.check_connection()",
        "pass",
        module="elastic_dp.train.worker_session",
        caught_by=f"{ON_A_DEVICE}::test_worker_whose_device_fails_while_it_connects_is_lost",
    ),
    ModuleMutant(
        "the host reads the loss of each micro-batch",
        "MicroBatchRunner.forward",
        "accelerator_of(self._device).asynchronous and not self._is_trial",
        "False",
        module="elastic_dp.train.step.micro_batch",
        caught_by=WAITS_ONCE,
    ),
    ModuleMutant(
        "the host compares each buffer",
        "ModuleBuffers.__init__",
        "any(accelerator_of(m.content.device).asynchronous for m in self._own)",
        "False",
        module="elastic_dp.train.state.module_buffers",
        caught_by=WAITS_ONCE,
    ),
    ModuleMutant(
        "the host reads the norm of the gradient",
        "StepRunner._apply",
        "self._group is not None and self._group.on_device is not None",
        "False",
        module="elastic_dp.train.step.step_runner",
        caught_by=WAITS_ONCE,
    ),
]


# The others take a minute together.
IN_CI = frozenset(
    {
        "an aborted collective is read",
        "members switch when one of them is connected",
        "a generation is left while the device is busy",
        "staging memory is used again while a peer reads it",
        "the next generation is formed with a broken device",
    }
)
_PATIENCE_S, _PATIENCE_WITH_RUNS_S = 5.0, 30.0


def mutate(name: str) -> None:
    """In this process, and in all workers that it starts."""
    mutant = next(one for one in DEVICE_MUTANTS if one.name == name)
    starts_workers = mutant.caught_by.startswith("tests/train/")
    patience.PATIENCE_S = _PATIENCE_WITH_RUNS_S if starts_workers else _PATIENCE_S
    take_out(mutant)
    if starts_workers:
        take_out_in_workers(__name__)


if "DEVICE_MUTANT" in os.environ:
    mutate(os.environ["DEVICE_MUTANT"])
