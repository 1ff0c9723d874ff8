"""What a worker does: the training thread's loop, and the thread that takes commands.

    context, steps_arguments       what a train function sees: `ctx`, and the checks of `ctx.steps`
    worker_session                 the loop over steps, over all generations of this process
    step_builder, step/            one step as a transaction: leaves, participants, commit, undo
    state/                         what a step changes, and how it is read, compared and written
    generations/                   joining and leaving a group of workers, and the state that moves
    checkpointing/                 when a checkpoint is due, its snapshot, its commit, its restore
    loop_guard/                    what a loop's body changes that a joining worker would lack
    exactness/                     why a run may be inexact: machines, kernels, code, optimizers
    local_run                      the same loop in the user's process, without Ray

Nothing here imports Ray.
"""
