"""Process groups that can be left at any instant, and sums of gradients in one order.

    rendezvous, process_group          forming a group, and its collectives
    device_transport                   the same over NCCL, once it is connected
    reduction_tree, gradient_reducer   the tree over virtual workers, and what a worker adds itself
    cross_worker_reduction             what workers add together
    gradient_exchange, gradient_norm   the sums as `ctx.steps` uses them; their norm, clipping
    gradient_rounding, int8_rounding   how sums are rounded on the wire

All of a group's waits can be abandoned from another thread.
"""
