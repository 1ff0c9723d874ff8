"""Checkpoints, for the restart of a run, for the user, and for other runs.

The modules, in the order in which a checkpoint passes through them:

    codec                            state as JSON and tensors, and back
    layout                           where the tensors' bytes lie: units and blobs
    snapshot, uploader               a copy in host memory, written in the background
    checkpoint_writer, commit_record the blobs, then one small conditional write
    catalog, lease                   which checkpoints count, who may write, what is deleted
    checkpoint_reader, exporting     loads state into a group of any size, or into other formats
    storage_probe                    whether a store can be trusted with checkpoints
"""
