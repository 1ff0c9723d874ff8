"""Checkpoints: for when everyone is gone, for the user, and for the next run.

In the order of their life:

    encoding, decoding   the state as JSON and tensors, and back
    layout               where the tensors' bytes lie: parts and blocks
    snapshot, uploader   a copy in host memory, written in the background
    writing, commit record        parts aside, then one small conditional write
    catalog, lease       which checkpoints count, who may write, what is deleted
    reading, exporting   back into a group of any size, or into other formats
    interval, proving    when to take one; whether a store can be trusted with it
"""
